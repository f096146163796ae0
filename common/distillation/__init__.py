"""Teachers of distill.py that are not models of this process."""
