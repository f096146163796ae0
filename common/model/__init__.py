"""The models: loading, sharding, attention, optimizers, FLOPs."""
