"""The batch script against a real Slurm and each cause of a job's end; the ranks are stand-ins."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.cluster_job import Job

SCRIPT = Path(__file__).parents[2] / "slurm" / "train.sbatch"
STANDIN = Path(__file__).parent / "standin" / "launcher.py"

Submit = Callable[..., Job]


def submit_in(
    cluster: SlurmCluster,
    directory: Path,
    behaviours: Sequence[str],
    *options: str,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Submit the script from ``directory``, where its ``python -m launcher`` finds the stand-in."""
    shutil.copy(STANDIN, directory)
    return cluster.sbatch(
        SCRIPT,
        *behaviours,
        options=options,
        environment={"EVERSTEP_PYTHON": sys.executable} | dict(environment or {}),
        cwd=directory,
    )


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path) -> Submit:
    def submit(*behaviours: str, options: Sequence[str] = (), **environment: str) -> Job:
        return submit_in(slurm, tmp_path, behaviours, *options, environment=environment)

    return submit


@pytest.fixture(scope="module")
def slow_jobs(
    slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Job, Path]]:
    """Jobs, and their directories, that meet the time limit: Slurm looks every half minute only.

    They run beside the other tests, in a partition where nobody preempts them.
    """
    jobs = {}
    for behaviour in ("stop", "deaf"):
        directory = tmp_path_factory.mktemp(behaviour)
        options = ("--time=1", "--partition=urgent")
        jobs[behaviour] = submit_in(slurm, directory, [behaviour, "0"], *options), directory
    return jobs


@pytest.fixture(scope="module", autouse=True)
def _start_early(slow_jobs: dict[str, tuple[Job, Path]]) -> None:
    """Have the slow jobs started before the first test."""


def events(job: Job, directory: Path, rank: int = 0) -> list[str]:
    """What the rank recorded: 'RESTART EVENT' lines."""
    path = directory / f"events.{job.id}.{rank}"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_event(job: Job, directory: Path, event: str) -> None:
    job.wait_until(
        lambda: all(event in events(job, directory, rank) for rank in (0, 1)),
        f"both ranks record {event!r}",
    )


def assert_ended(job: Job, state: str, *, restarts: int, said: str, exit_code: int = 0) -> None:
    assert job.wait_until_ended() == state, job.output
    shown = job.show()
    assert (shown["Restarts"], shown["ExitCode"]) == (str(restarts), f"{exit_code}:0"), job.output
    assert said in job.output


def test_saved_is_requeued_until_done(submit: Submit, tmp_path: Path) -> None:
    job = submit("75", "75", "0")
    assert_ended(job, "COMPLETED", restarts=2, said="done (exit code 0)")
    assert [line for line in events(job, tmp_path, rank=1) if line.endswith("started")] == [
        "0 started",
        "1 started",
        "2 started",
    ]
    # The log of the first run is still there, before the others'.
    assert (
        job.output.index("restart 0")
        < job.output.index("requeueing")
        < job.output.index("restart 1")
    )
    assert not list((tmp_path / ".everstep").iterdir())


@pytest.mark.parametrize(
    ("verdict", "state", "said"),
    [
        (0, "COMPLETED", "done"),
        (70, "FAILED", "no progress, or stopped by a guard: not requeued"),
        (78, "FAILED", "the configuration is wrong: not requeued"),
    ],
)
def test_final_verdict_is_the_exit_code(
    submit: Submit, verdict: int, state: str, said: str
) -> None:
    assert_ended(submit(str(verdict)), state, restarts=0, said=said, exit_code=verdict)


@pytest.mark.parametrize("behaviour", ["killed", "1"])
def test_death_after_the_start_is_requeued(submit: Submit, behaviour: str) -> None:
    assert_ended(submit(behaviour, "0"), "COMPLETED", restarts=1, said="died (verdict")


@pytest.mark.parametrize("behaviour", ["stop", "deaf"])
def test_cancelled_is_not_requeued(submit: Submit, tmp_path: Path, behaviour: str) -> None:
    """Neither after the ranks have saved, nor when they die before the batch shell is told."""
    job = submit(behaviour, "0")
    wait_for_event(job, tmp_path, "0 started")
    job.cancel()
    assert job.wait_until_ended() == "CANCELLED"
    assert events(job, tmp_path)[-1] == "0 SIGTERM"
    assert "cancelled: not requeued" in job.output
    assert job.restarts == 0


def test_requeue_by_hand_counts_once(submit: Submit, tmp_path: Path) -> None:
    job = submit("stop", "0")
    wait_for_event(job, tmp_path, "0 started")
    job.requeue()
    assert_ended(job, "COMPLETED", restarts=1, said="Slurm has requeued the job")
    assert "0 SIGTERM" in events(job, tmp_path)
    assert "saved, to be continued" in job.output


@pytest.mark.parametrize("behaviour", ["stop", "loading"])
def test_preempted_comes_back(
    slurm: SlurmCluster, submit: Submit, tmp_path: Path, behaviour: str
) -> None:
    """Also when the ranks had not started yet: being in the way of others is no failure."""
    most = "--cpus-per-task=2"  # of a node's four; the slow jobs have the others
    job = submit(behaviour, "0", options=[most])
    wait_for_event(job, tmp_path, f"0 behaves:{behaviour}")
    slurm.srun("--partition=urgent", most, "true")
    assert_ended(job, "COMPLETED", restarts=1, said="Slurm has requeued the job")
    assert "0 SIGTERM" in events(job, tmp_path)


def test_no_such_program(submit: Submit) -> None:
    job = submit("0", EVERSTEP_PYTHON="/nowhere/python")
    assert job.wait_until_ended() == "FAILED"
    assert "the ranks never started" in job.output
    assert job.restarts == 0


def test_status_directory_that_cannot_be_written(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = submit("0", EVERSTEP_STATUS_DIR=str(tmp_path / "file" / "status"))
    assert_ended(job, "FAILED", restarts=0, said="set EVERSTEP_STATUS_DIR", exit_code=1)
    assert not events(job, tmp_path)


def test_submitted_with_no_requeue(submit: Submit) -> None:
    job = submit("75", options=["--no-requeue"])
    assert_ended(job, "FAILED", restarts=0, said="submitted with --no-requeue", exit_code=75)


def test_task_of_an_array_is_requeued_alone(
    submit: Submit, slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The last task's own job id is the array's: requeueing that would restart its siblings."""
    array = submit("0:0", "1:stop", "1:0", options=["--array=0-1"])
    first, last = (Job(slurm, f"{array.id}_{index}", array.log) for index in (0, 1))
    assert first.wait_until_ended() == "COMPLETED"
    wait_for_event(array, tmp_path, "0 started")
    last.cancel("--signal=USR2")
    assert last.wait_until_ended() == "COMPLETED"
    assert last.restarts == 1
    assert (first.state, first.restarts) == ("COMPLETED", 0)


def test_sparing_export_does_not_hide_the_status_file(submit: Submit) -> None:
    job = submit("75", "0", options=["--export=EVERSTEP_PYTHON"])
    assert_ended(job, "COMPLETED", restarts=1, said="saved, to be continued")


def test_10_no_scontrol_in_the_container(submit: Submit, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "env", "mkdir", "rm", "srun", "timeout", "touch", "true"):
        (programs / name).symlink_to(shutil.which(name) or name)
    job = submit("75", PATH=str(programs))
    assert_ended(job, "FAILED", restarts=0, said="no scontrol here", exit_code=75)


def test_10_a_scontrol_that_fails_at_first(
    slurm: SlurmCluster, submit: Submit, tmp_path: Path
) -> None:
    real = shutil.which("scontrol", path=slurm.environment["PATH"])
    once = f'mkdir "{tmp_path}/failed" 2>/dev/null && exit 1\nexec {real} "$@"'
    job = submit("75", "0", PATH=f"{_shim(tmp_path, 'scontrol', once)}:{os.environ['PATH']}")
    assert_ended(job, "COMPLETED", restarts=1, said="scontrol show job failed, try 1 of 10")


def test_env_that_cannot_block_signals(submit: Submit, tmp_path: Path) -> None:
    old = f'[[ $1 != --block-signal* ]] || exit 125\nexec {shutil.which("env")} "$@"'
    job = submit("75", "0", PATH=f"{_shim(tmp_path, 'env', old)}:{os.environ['PATH']}")
    assert_ended(job, "COMPLETED", restarts=1, said="done")


def test_run_without_sbatch() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    done = subprocess.run(
        ["bash", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "submit this script with sbatch" in done.stdout


def test_warning_before_the_time_limit(slow_jobs: dict[str, tuple[Job, Path]]) -> None:
    """The script's own --signal line: USR2 reaches the ranks, not the batch shell or srun."""
    job, directory = slow_jobs["stop"]
    assert_ended(job, "COMPLETED", restarts=1, said="saved, to be continued")
    for rank in (0, 1):
        assert events(job, directory, rank)[:3] == ["0 behaves:stop", "0 started", "0 SIGUSR2"]


def test_time_limit_is_requeued(slow_jobs: dict[str, tuple[Job, Path]]) -> None:
    """By the script: Slurm itself never requeues what it ended for its time."""
    job, _ = slow_jobs["deaf"]
    assert job.wait_until_ended(seconds=150) == "COMPLETED"
    assert job.restarts == 1
    assert "DUE TO TIME LIMIT" in job.output
    assert "died (verdict started" in job.output
    assert "train.sbatch: requeueing the job" in job.output


def _shim(directory: Path, name: str, body: str) -> Path:
    """Put a program of that name in a directory of its own, and return the directory."""
    programs = directory / "shims"
    programs.mkdir()
    program = programs / name
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return programs
