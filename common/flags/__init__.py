"""The flags of a run: which of them act, and how they are written down without secrets."""
