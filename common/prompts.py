"""Prompts: which rows of data are accepted, and how the chat template turns them into tokens.

The columns are verl's: `prompt`, `data_source`, `reward_model` and perhaps `extra_info`. common/dataset/store.py reads
the files, checks the flags of the chat template, and keeps the tokenised prompts in a file that all ranks of a node
share (`load_prompts`). common/curriculum/sampler.py says in which order they come.
"""

from dataclasses import dataclass, field
from typing import Any

from common.flags.data import DataConfig as DataConfig
from common.flags.data import TemplateConfig as TemplateConfig


@dataclass
class Prompt:
    tokens: list[int]  # what the engine gets, generation prompt included
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, str]]
    row: dict[str, Any] = field(default_factory=dict, repr=False)  # the columns that were read; for episodes, all
    images: Any = None  # common/dataset/images.py; None: there are none
