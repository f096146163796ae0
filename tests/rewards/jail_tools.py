"""Shared by the tests of the sandbox: what this machine allows, small limits, and ways to run and to find a jail."""

import contextlib
import functools
import platform
import re
import subprocess
from pathlib import Path

import pytest

from rewards.sandbox.sandbox import Limits, run

SMALL = Limits(timeout_s=20, memory_mb=200, threads=8, file_mb=1, folder_mb=2, files=16)


@functools.cache
def isolated() -> bool:
    """By util-linux and not by our own jail: a broken one must fail, not skip."""
    names = ["--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork"]
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return release >= (5, 14) and subprocess.run(["unshare", *names, "true"], capture_output=True).returncode == 0


needs_isolation = pytest.mark.skipif(not isolated(), reason="no user namespaces here, or Linux before 5.14")


def jails(parent: int) -> list[int]:
    """Processes of the jails that `parent` started (before they become the program)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f'"parent": {parent},'.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def output(program: str, stdin: str = "", limits: Limits = SMALL, forks: bool = False) -> list[str]:
    """Lines that a program prints in the jail; it must end well."""
    result = run(program, stdin, limits, forks=forks)
    assert result.exit_code == 0, result.stderr
    return result.stdout.splitlines()


def tries(*statements: str) -> str:
    """A program that prints, for each statement, "done" or the error's name."""
    return "import ctypes, os, signal, socket, sys\n" + "".join(
        f"try:\n    {statement}\n    print('done')\nexcept Exception as error:\n    print(type(error).__name__)\n"
        for statement in statements)
