"""Loggers, console, what every script logs of a step, warnings."""
