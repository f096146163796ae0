"""The flags of a run: what they are and must be, which of them act, and how they are written down without secrets.

Nothing here imports torch, transformers or vLLM, so that a mistyped command can be refused before they are."""

from common.flags.correction import resolve_correction
from common.flags.run import RunArgs, SupervisedArgs, TrainArgs

__all__ = ["RunArgs", "SupervisedArgs", "TrainArgs", "resolve_correction"]
