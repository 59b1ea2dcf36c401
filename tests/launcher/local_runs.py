"""Local runs of the tiny experiment on two ranks: start, disturb, read what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
STEPS = 20
Bits = dict[int, tuple[Any, ...]]


def start(
    directory: Path, *overrides: str, terminal: int | None = None, **environ: str
) -> subprocess.Popen[str]:
    """Start the run; `terminal` is a descriptor for all that it says, in place of pipes."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "launcher",
            "experiment=tiny",
            f"run.dir={directory}",
            f"train.steps={STEPS}",
            "launch.ranks=2",
            *overrides,
        ],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"} | environ,
        stdin=subprocess.DEVNULL,
        stdout=terminal or subprocess.PIPE,
        stderr=terminal or subprocess.PIPE,
        text=True,
    )


def run(directory: Path, *overrides: str, **environ: str) -> tuple[int, str]:
    """Return the exit code and all that the run said."""
    process = start(directory, *overrides, **environ)
    output, errors = process.communicate()
    return process.returncode, output + errors


def records(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def bits(directory: Path) -> Bits:
    """What each step computed, the last word on each: exact, since floats are written by repr."""
    return {
        line["step"]: (line["loss"], line["lr"], line["grad_norm"], line["sample_offset"])
        for line in records(directory, "metrics.jsonl")
    }


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Read the run's lines until it has said a step; the first one is always said."""
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith(f"step {step}/"):
        assert line, "ended before that step"


def faulty(fault: str, rank: int, at_forward: int, fired: Path) -> list[str]:
    return [
        "model._target_=tests.launcher.faulty_model.FaultyGPT",
        f"+model.fault={fault}",
        f"+model.rank={rank}",
        f"+model.at_forward={at_forward}",
        f"+model.fired={fired}",
    ]
