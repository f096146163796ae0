"""With this folder in PYTHONPATH, `vllm serve` finds stand-ins for the packages of its server that are missing: for tests
that start it by tools.serve."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("vllm_server", Path(__file__).parents[2] / "vllm_server.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.stand_in()
