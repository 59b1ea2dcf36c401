"""The words that `everstep` takes in place of overrides: tools that look at runs.

Each is a module's `main(arguments) -> exit code`, imported only when it is asked for.
"""

import importlib
from collections.abc import Sequence

_MODULES = {
    "doctor": "launcher.doctor",
    "status": "launcher.seeing.status",
}


def is_tool(arguments: Sequence[str]) -> bool:
    """Tell whether a command line is a tool's. No override is one word without `=`."""
    return bool(arguments) and arguments[0] in _MODULES


def run(arguments: Sequence[str]) -> int:
    """Run the tool that the first argument names, and return its exit code."""
    code: int = importlib.import_module(_MODULES[arguments[0]]).main(arguments[1:])
    return code
