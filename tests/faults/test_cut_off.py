"""A run that was stopped for longer than the lease, and wakes up beside its successor."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from engine.protocol import adoption, takeover
from engine.protocol.acquire import Lease, acquire
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.owner import Owner
from tests import daemons, tiny_run
from tests.protocol.saves import ELSEWHERE
from tests.run_processes import MARK
from tests.slurm.cluster_job import wait_for

_END_SECONDS = 180
_LEASE = Lease(seconds=1.0, beat_seconds=0.1)


def test_a_run_that_was_taken_over_meanwhile_stops_although_no_save_is_due(tmp_path: Path) -> None:
    run = tmp_path / "run"
    starter = subprocess.Popen(
        [
            *(sys.executable, "-m", "launcher", "experiment=tiny", f"run.dir={run}"),
            *("train.steps=1000000000", "checkpoint.every_steps=1000000000"),
        ],
        env=os.environ | tiny_run.environment() | {MARK: str(run)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: tiny_run.steps_done(run) >= 3, _END_SECONDS, "trains")
        stopped = daemons.marked(MARK, run)
        assert len(stopped) == 7, "starter, and for each rank keeper, trainer and writer"
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        directory = CheckpointDirectory(str(run / "checkpoints"))
        _take_over(directory)
        left = _everything_in(directory)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        _, errors = starter.communicate(timeout=_END_SECONDS)
        wait_for(lambda: not daemons.marked(MARK, run), _END_SECONDS, "all of it has ended")
    finally:
        daemons.kill_marked(MARK, run)
        starter.wait()
    assert starter.returncode == 1
    assert "a newer one took over; this attempt (0) must not go on" in errors
    end = json.loads((run / "attempts.jsonl").read_text().splitlines()[-1])
    assert "this attempt (0) must not go on" in end["cause"]
    (fenced,) = tiny_run.events(run, "fenced")
    assert fenced["reason"] == "another start has closed this attempt"
    assert tiny_run.events(run, "staged") == []
    assert _everything_in(directory) - left <= _beats_of(directory, 0)


def _take_over(directory: CheckpointDirectory) -> None:
    """Be the next start, on a host that cannot look the first one's processes up."""
    me = replace(Owner.this_process(2, {}), place=ELSEWHERE)
    assert acquire(directory, me, _LEASE).attempt == 1
    assert adoption.adopt(directory, 1) == []
    takeover.begin(directory, 1, None)


def _everything_in(directory: CheckpointDirectory) -> set[str]:
    return {str(path) for path in Path(directory.root).rglob("*")}


def _beats_of(directory: CheckpointDirectory, attempt: int) -> set[str]:
    return {str(path) for path in Path(directory.attempt(attempt).path).glob("beat.*")}
