"""The models: loading, sharding, packed forward, attention, shared prompts, offload, FLOPs, memory."""
