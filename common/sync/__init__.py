"""Weights on their way into an engine: their names there, how they are loaded, checksums of both sides."""
