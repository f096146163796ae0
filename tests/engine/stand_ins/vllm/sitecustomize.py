"""With this folder in PYTHONPATH, vLLM's server finds stand-ins for its packages that are missing: for tests that start
it by tools.serve."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("vllm_server", Path(__file__).parents[2] / "vllm_server.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.stand_in()
