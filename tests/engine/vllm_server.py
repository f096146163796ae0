"""vLLM's server of OpenAI's interface, as `vllm serve` starts it: `python tests/engine/vllm_server.py --model ...`.

The CPU set of packages has vLLM's engine without three packages of its server: they count requests, reload certificates
and answer Amazon's health checks. Where they are missing, modules that do nothing stand in for them.
"""

import importlib.util
import sys
import types
from typing import Any


class Anything(types.ModuleType):
    """A module whose functions are decorators that return what they are given, or make such a decorator."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return unchanged


def unchanged(*given: Any, **_: Any) -> Any:
    return given[0] if given else unchanged


class Instrumentator:
    """Of prometheus_fastapi_instrumentator: each call returns the object itself."""

    def __init__(self, **_: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def stand_in() -> None:
    standards = "model_hosting_container_standards"
    for name in ("watchfiles", "prometheus_fastapi_instrumentator", standards):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = Anything(name)
            if name == standards:
                sys.modules[f"{name}.sagemaker"] = sys.modules[name].sagemaker = Anything(f"{name}.sagemaker")
            elif name != "watchfiles":
                sys.modules[name].Instrumentator = Instrumentator


if __name__ == "__main__":
    stand_in()
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
