"""What was fully staged when every trainer was killed is committed, whoever started the ranks.

Under Slurm, where a task's end kills all that it left, the same is in `tests/slurm`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_run
from tests.run_processes import MARK, kill_trainers_once_staged

STARTERS = {
    "local": [sys.executable, "-m", "launcher", "launch.ranks=2"],
    "deepspeed": [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--num_accelerators=2", "--module", "launcher"),
    ],
}


@pytest.mark.parametrize("starter", STARTERS)
def test_a_staged_save_is_committed_after_every_trainer_was_killed(
    starter: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    environment = os.environ | tiny_run.environment() | {MARK: str(run)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = [*STARTERS[starter], *tiny_run.arguments(run)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as process:
        step = kill_trainers_once_staged(run)
        assert process.wait(120) != 0
    # The starter has ended, so the writers have been waited for: this is no race.
    assert (run / "checkpoints" / f"global_step{step}" / "manifest.json").exists()
    again = [sys.executable, "-m", "launcher", *tiny_run.arguments(run), "launch.ranks=2"]
    subprocess.run(again, env=environment, stdin=subprocess.DEVNULL, check=True, timeout=180)
    assert [event["step"] for event in tiny_run.events(run, "resumed")] == [step]
    assert tiny_run.losses(run) == tiny_run.reference_losses()
