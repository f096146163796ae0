"""Shared by the tests of engines."""

import importlib

import pytest

from tests.checkpoint.faulty import freeze
from tests.conftest import VLLM


@pytest.fixture(scope="session")
def frozen_imports():
    """An engine collects garbage often, and vLLM's modules are most of what is visited then."""
    importlib.import_module(VLLM)
    freeze()
