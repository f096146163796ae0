"""The models: loading, sharding, packed forward, attention, optimizers, offload, FLOPs, memory."""
