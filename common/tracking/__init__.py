"""Loggers, console, recorded rollouts, validation results, warnings."""
