"""The engine that samples, its weight sync and checks."""
