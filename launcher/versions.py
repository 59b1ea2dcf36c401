"""Versions of what decides a run's bits, read without importing any of it: `everstep --version`."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("everstep", "torch", "deepspeed", "numpy", "safetensors")


def installed() -> dict[str, str]:
    """Return the version of Python and of each package."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main(arguments: Sequence[str]) -> int:
    """Print them, a line each, and return the exit code."""
    for name, number in installed().items():
        print(f"{name} {number}")
    return 0
