"""What vLLM needs of torchvision to import its vision-language models, for machines without it. The processors of
images are transformers' own, on Pillow; nothing of this is called."""

import importlib.util
import sys
import types
from unittest import mock

from transformers import ProcessorMixin
from transformers.processing_utils import VideosKwargs

import common.dataset.images  # noqa: F401, leaves processors of videos out

NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def without_torchvision() -> None:
    """Import vLLM's models. Does nothing where torchvision is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    video = types.SimpleNamespace(
        valid_kwargs=VideosKwargs, size={"shortest_edge": 3136, "longest_edge": 10**6}, merge_size=2, patch_size=14,
        temporal_patch_size=2,
    )
    ProcessorMixin.video_processor = video
    sys.modules.update({name: mock.MagicMock(name=name) for name in NAMES})
    try:
        from vllm.model_executor.models import interns1, qwen2_5_vl, qwen3_vl, registry  # noqa: F401
    finally:
        for name in NAMES:
            del sys.modules[name]
    interns1.cached_video_processor_from_config = lambda *_, **__: video
    registry._run_in_subprocess = lambda inspect: inspect()             # the subprocess would have no stand-in
