"""Validation by sampling, in training."""
