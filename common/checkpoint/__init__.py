"""Checkpoints, the run folder, signals and hangs, export."""
