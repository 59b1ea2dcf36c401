"""Clusters for the tests here, each started when a test first wants it, one for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import SlurmCluster, cgroup_obstacle, missing_programs


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
