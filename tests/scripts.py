"""Scripts in processes of their own: what they import, and what limits they set, is theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_REPOSITORY = Path(__file__).parents[1]


def run_script(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python code in the repository's root; it finds the arguments in `sys.argv`."""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
