"""DeepSpeed's starters die or are signalled alone; the ranks notice, save, and all end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param("runner", signal.SIGTERM, id="a TERM that the runner does not pass on"),
        pytest.param("launch", signal.SIGUSR1, id="a USR1 that kills the launcher of the node"),
        pytest.param("launch", signal.SIGKILL, id="the launcher of the node is killed"),
    ],
)
def test_ranks_whose_starter_is_lost_save_and_end(
    victim: str, number: signal.Signals, tmp_path: Path
) -> None:
    runner = subprocess.Popen(
        [
            Path(sys.executable).with_name("deepspeed"),
            "--num_accelerators=2",
            "--module",
            "launcher",
            "experiment=tiny",
            f"run.dir={tmp_path}",
            "train.steps=100000",
        ],
        env=os.environ
        | {
            "PYTHONPATH": str(REPOSITORY),
            "DS_ACCELERATOR": "cpu",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert runner.stdout is not None
    while not (line := runner.stdout.readline()).startswith("step "):
        assert line, "ended before its first step"
    (launch,) = children(runner.pid)
    keepers = children(launch)
    trainers = [pid for keeper in keepers for pid in children(keeper)]
    assert len(keepers) == 2
    ends = [os.pidfd_open(pid) for pid in (*keepers, *trainers)]
    os.kill(runner.pid if victim == "runner" else launch, number)
    runner.communicate()  # until every process that could write has ended
    for end in ends:
        assert select.select([end], [], [], 60)[0], "a process of the run lives on"
        os.close(end)
    *_, last = (tmp_path / "attempts.jsonl").read_text().splitlines()
    record = json.loads(last)
    assert (record["event"], record["exit_code"], record["cause"]) == ("end", 75, "SIGTERM")
    assert (tmp_path / "checkpoints" / f"global_step{record['step']}").is_dir()
