"""Clusters for the tests here, each started when a test first wants it, one for the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny_run
from tests.slurm.cluster import SlurmCluster, cgroup_obstacle, missing_programs
from tests.slurm.cluster_job import Job


def _require_slurm() -> None:
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (tests/install_system_packages.sh)")


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Two nodes on which detached processes outlive their task."""
    _require_slurm()
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_with_cgroups() -> Iterator[SlurmCluster]:
    """Two nodes on which all that a task started dies with it: the usual choice in the field."""
    _require_slurm()
    if obstacle := cgroup_obstacle():
        pytest.skip(obstacle)
    with SlurmCluster(proctrack="cgroup") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def stopped_twice(
    slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Job, int]:
    """A complete run of a job that was stopped by the warning before a time limit, when the script
    requeues, and then by Slurm's own requeue; with the step of the first stop."""
    directory = tmp_path_factory.mktemp("stopped_twice")
    run = directory / "run"
    job = slurm.sbatch(
        tiny_run.REPOSITORY / "slurm" / "train.sbatch",
        *tiny_run.arguments(run),
        environment=tiny_run.environment() | {"EVERSTEP_PYTHON": sys.executable},
        cwd=directory,
    )
    job.wait_until(lambda: tiny_run.steps_done(run) >= 5, "trains", seconds=120)
    job.cancel("--signal=USR2")
    job.wait_until_restarted(1, seconds=120)
    stopped_at = tiny_run.steps_done(run)
    job.wait_until(lambda: tiny_run.steps_done(run) > stopped_at, "trains again", seconds=120)
    job.requeue()
    assert job.wait_until_ended(seconds=180) == "COMPLETED", job.output
    return run, job, stopped_at
