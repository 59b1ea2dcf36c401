"""Versions of what decides a run's bits, read without importing any of it."""

import platform
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
