"""grpo.py and sft.py on a tiny random mixture of experts with all that is about experts."""

import json

import pytest
import torch

from tests.conftest import launch_all
from tests.scripts.test_grpo import TINY
from tests.scripts.test_router_replay import mixture  # noqa: F401 (fixture)
