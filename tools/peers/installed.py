"""Which peers are there: `tools/setup.sh peers` puts each into a folder of its own."""

import importlib.util
import sys
from pathlib import Path

from tools.flags import ROOT

PEERS = {"verl": "verl", "trl": "TRL"}
"""Package -> what people call it."""


def folder_of(peer: str) -> Path:
    """Where `tools/setup.sh peers` puts it."""
    return ROOT / f".venv-{peer}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def is_installed(peer: str) -> bool:
    """Its folder is searched from now on, after all others."""
    folder = str(folder_of(peer))
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.util.find_spec(peer) is not None
