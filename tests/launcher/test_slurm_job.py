"""What Slurm says of a job, as a stop's cause; and the end of its time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from launcher.slurm_job import SlurmJob, TimeLimit
from tests.launcher.test_config import compose


def inside(**variables: str) -> dict[str, str]:
    """The environment of the last task of an array, whose own job id is the array's."""
    array = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    return {"PATH": os.environ["PATH"], **array, **variables}


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a `scontrol` that answers for one job with the given fields."""

    def say(fields: str) -> None:
        program = tmp_path / "scontrol"
        program.write_text(f'#!/bin/sh\n[ "$*" = "--oneliner show job 7_2" ] && echo "{fields}"\n')
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return say


RUNNING = "JobId=8 JobState=RUNNING Reason=None Requeue=1 Restarts=1"


def soon() -> str:
    """A time as Slurm writes it, in less than two minutes."""
    return datetime.fromtimestamp(time.time() + 100).isoformat(timespec="seconds")


@pytest.mark.parametrize(
    ("fields", "cause", "told"),
    [
        (f"{RUNNING} EndTime=SOON", "SIGUSR2", "SIGUSR2 (time limit)"),
        (f"{RUNNING} EndTime=SOON", "SIGTERM", "SIGTERM"),
        (f"{RUNNING} EndTime=2099-01-01T00:00:00", "SIGUSR2", "SIGUSR2"),
        (f"{RUNNING} EndTime=Unknown", "SIGUSR2", "SIGUSR2"),
        (f"{RUNNING} PreemptTime=2026-11-29T22:00:00", "SIGTERM", "SIGTERM (preempted)"),
        (f"{RUNNING} PreemptTime=None", "SIGTERM", "SIGTERM"),
        ("JobState=COMPLETING Reason=None Restarts=2", "SIGTERM", "SIGTERM (requeued by Slurm)"),
        ("JobState=COMPLETING Reason=TimeLimit Restarts=1", "SIGTERM", "SIGTERM (time limit)"),
        ("JobState=CANCELLED Reason=None Restarts=1", "SIGTERM", "SIGTERM (cancelled)"),
        ("nonsense", "SIGTERM", "SIGTERM"),
    ],
)
def test_the_cause_of_a_stop(
    says: Callable[[str], None], fields: str, cause: str, told: str
) -> None:
    says(fields.replace("SOON", soon()))
    assert SlurmJob(inside(SLURM_RESTART_COUNT="1")).why_stopped(cause) == told


def test_a_controller_that_does_not_answer_costs_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SlurmJob(inside()).why_stopped("SIGTERM") == "SIGTERM"
    assert SlurmJob(inside()).end_time() is None


def test_when_a_jobs_time_is_over(says: Callable[[str], None]) -> None:
    at = soon()
    says(f"{RUNNING} EndTime={at}")
    end = SlurmJob(inside()).end_time()
    assert end == datetime.fromisoformat(at).timestamp()
    assert SlurmJob(inside(SLURM_JOB_END_TIME="1234")).end_time() == 1234
    now = [end - 61]
    limit = TimeLimit(end, 60, clock=lambda: now[0])
    assert limit.look() is None
    now[0] += 1
    assert limit.look() == TimeLimit.CAUSE


def test_the_lead_time_is_the_submitted_jobs(
    says: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["everstep"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    # Not AT: by now it may be long ago.
    end = datetime.fromtimestamp(time.time() + 100).isoformat(timespec="seconds")
    says(f"{RUNNING} EndTime={end}")
    words = ["launch=slurm", "launch.ranks_per_node=1", "launch.signal_lead_seconds=50"]
    job = SlurmJob.of(inside(SLURM_RESTART_COUNT="1"), compose(*words).launch)
    assert job is not None
    assert job.why_stopped("SIGUSR2") == "SIGUSR2"
    assert SlurmJob.of({}, compose().launch) is None
