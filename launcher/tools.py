"""The words that `everstep` takes in place of overrides: tools that look at runs.

Each is a module's `main(arguments) -> exit code`, imported only when it is asked for. The engine's
own commands that are asked for the morning after have a word here, too.
"""

import importlib
import io
import sys
from collections.abc import Sequence

from engine import tool

_MODULES = {
    "--version": "launcher.versions",
    "doctor": "launcher.doctor",
    "report": "launcher.seeing.report",
    "settings": "launcher.reference.lookup",
    "status": "launcher.seeing.status",
}
_OF_THE_ENGINE = ("diff",)

NAMES = sorted([*_MODULES, *_OF_THE_ENGINE])


def is_tool(arguments: Sequence[str]) -> bool:
    """Tell whether a command line is a tool's. No override is one word without `=`."""
    return bool(arguments) and arguments[0] in NAMES


def run(arguments: Sequence[str]) -> int:
    """Run the tool that the first argument names, and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name on disk need not be of this encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    return tool.run("everstep", lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    code: int
    if arguments[0] in _OF_THE_ENGINE:
        code = importlib.import_module("engine.__main__").main(arguments)
    else:
        code = importlib.import_module(_MODULES[arguments[0]]).main(arguments[1:])
    return code
