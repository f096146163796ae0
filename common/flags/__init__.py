"""The flags of a run: what they are and must be, which of them act, and how they are written down without secrets.

Nothing here imports torch, transformers or vLLM, so that a mistyped command can be refused before they are."""
