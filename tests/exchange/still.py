"""Runs of the launcher that change no weight: what comes out must be what went in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import tiny_run

# So small a rate leaves every fp32 weight as it is, in all its bits.
RATE = 1e-30
STILL = ("experiment=tiny", f"optimizer.lr={RATE}", "checkpoint.every_steps=1", "launch.ranks=2")


def train(run: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Train without changing a weight; return how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "launcher", *STILL, f"run.dir={run}", *overrides],
        env=os.environ | tiny_run.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
