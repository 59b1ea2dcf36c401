"""Real training under a real Slurm: the bits of an undisturbed local run, whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_run
from tests.run_processes import MARK, kill_trainers_once_staged
from tests.slurm.cluster import SlurmCluster
from tests.slurm.cluster_job import Job

LAUNCHER = (sys.executable, "-m", "launcher")
# Its first process ends like a container's, and the kernel kills what is left in it.
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def test_srun(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    slurm.srun(
        *LAUNCHER,
        *tiny_run.arguments(run),
        environment=tiny_run.environment(),
        cwd=tmp_path,
        seconds=180,
    )
    assert tiny_run.losses(run) == tiny_run.reference_losses()


def test_sbatch_stopped_twice(stopped_twice: tuple[Path, Job, int]) -> None:
    run, job, stopped_at = stopped_twice
    assert job.restarts == 2
    assert job.output.count("saved, to be continued") == 2
    steps = [event["step"] for event in tiny_run.events(run, "resumed")]
    assert len(steps) == 2
    assert 5 <= steps[0] == stopped_at < steps[1] < tiny_run.STEPS
    assert tiny_run.losses(run) == tiny_run.reference_losses()


@pytest.fixture(params=["cgroup", "container"])
def nothing_outlives_its_task(
    request: pytest.FixtureRequest,
) -> tuple[SlurmCluster, tuple[str, ...]]:
    """A cluster, and what to put before a task's command there."""
    if request.param == "cgroup":
        return request.getfixturevalue("slurm_with_cgroups"), ()
    if os.geteuid() != 0:
        pytest.skip("a process-id namespace needs root")
    return request.getfixturevalue("slurm"), CONTAINER


def test_that_nothing_outlives_its_task(
    nothing_outlives_its_task: tuple[SlurmCluster, tuple[str, ...]], tmp_path: Path
) -> None:
    """The next test means nothing unless this one holds: a detached process dies with its task."""
    cluster, prefix = nothing_outlives_its_task
    # The child says that it runs, holding a pipe open; nothing else does once the task has ended.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    leave_one = 'setsid sleep 600 </dev/null >"$0" 2>/dev/null &'
    cluster.srun("--nodes=1", "--ntasks=1", *prefix, "bash", "-c", leave_one, fifo)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # end of file: its last writer is gone
    os.close(reader)


def test_a_staged_save_is_committed_after_every_trainer_was_killed(
    nothing_outlives_its_task: tuple[SlurmCluster, tuple[str, ...]], tmp_path: Path
) -> None:
    """The keeper is what the starter waits for, so the writer is given the time it needs."""
    cluster, prefix = nothing_outlives_its_task
    run = tmp_path / "run"
    options = ("--nodes=2", "--ntasks=2", "--kill-on-bad-exit=0")
    task = (*prefix, *LAUNCHER, *tiny_run.arguments(run))
    environment = cluster.environment | tiny_run.environment() | {MARK: str(run)}
    with subprocess.Popen(
        ["srun", *options, *task],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as srun:
        kept = kill_trainers_once_staged(run)
        output, _ = srun.communicate(timeout=60)
    assert srun.returncode != 0
    assert (run / "checkpoints" / f"global_step{kept}" / "manifest.json").exists(), output
    # More than a directory: the run goes on from there.
    cluster.srun(
        *(*task, f"resume=global_step{kept}"),
        environment=tiny_run.environment(),
        cwd=tmp_path,
        seconds=180,
    )
    assert [event["step"] for event in tiny_run.events(run, "resumed")] == [kept]
    assert tiny_run.losses(run) == tiny_run.reference_losses()
