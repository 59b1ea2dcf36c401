"""The tiny experiment as an end-to-end test: how to start it anywhere, and which bits it must give.

The reference is one local run on two ranks, made once per test session. Every other way to run the
same settings, with whatever happens to it on the way, must end with the same losses, bit for bit.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
STEPS = 80
"""Long enough to be interrupted in the middle."""


def arguments(run_directory: Path) -> list[str]:
    """The command line's overrides."""
    return ["experiment=tiny", f"train.steps={STEPS}", f"run.dir={run_directory}"]


def environment() -> dict[str, str]:
    """Variables to add for ranks on CPUs of this machine, wherever they are started."""
    return {
        "PYTHONPATH": str(REPOSITORY),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def steps_done(run_directory: Path) -> int:
    """The last step that the run has written, so far; 0 before the first."""
    lines = _metrics(run_directory)
    return int(lines[-1]["step"]) if lines else 0


def losses(run_directory: Path) -> list[tuple[int, str]]:
    """Step and loss of the whole run: where steps were repeated, the last word on each."""
    last = {line["step"]: repr(line["loss"]) for line in _metrics(run_directory)}
    return sorted(last.items())


def events(run_directory: Path, kind: str) -> list[dict[str, Any]]:
    """What the run has told of one kind of event, in order, so far."""
    lines = _json_lines(run_directory / "events.jsonl")
    return [line for line in lines if line["event"] == kind]


@functools.cache
def reference_losses() -> list[tuple[int, str]]:
    """The losses of a local run that nothing disturbed."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "run"
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *arguments(directory), "launch.ranks=2"],
            env=os.environ | environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        reference = losses(directory)
    assert [step for step, _ in reference] == list(range(1, STEPS + 1))
    return reference


def _metrics(run_directory: Path) -> list[dict[str, Any]]:
    return _json_lines(run_directory / "metrics.jsonl")


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may still be written, or not be there yet."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]
