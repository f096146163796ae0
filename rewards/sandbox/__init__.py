"""Runs programs that a model wrote, so that they can neither hurt nor outlive the trainer."""
