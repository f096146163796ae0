"""Validation by sampling, for scripts that do not sample otherwise."""
