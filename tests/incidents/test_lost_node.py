"""A node of a Slurm job dies with everything on it, and does not come back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import daemons, tiny_run
from tests.incidents.page import incident
from tests.slurm.cluster import SlurmCluster, missing_programs
from tests.slurm.cluster_job import Job
from tests.slurm.test_reports import SECONDS, submit, wait_until_it_trains

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_programs()), reason="tests/install_system_packages.sh"),
]

_SLURMD_TIMEOUT_SECONDS = 10


def kill_node(slurm: SlurmCluster, node: str) -> None:
    """SIGKILL the node's daemon, and then all that its job has there."""
    (daemon,) = (
        pid
        for pid in daemons.marked("SLURM_CONF", slurm.environment["SLURM_CONF"])
        if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(f"\0-N\0{node}\0".encode())
    )
    ranks = daemons.marked("SLURMD_NODENAME", node)
    assert ranks
    for pid in (daemon, *ranks):
        os.kill(pid, signal.SIGKILL)


def test_a_node_is_lost(tmp_path: Path) -> None:
    page = incident("A node is lost")
    run = tmp_path / "run"
    endless = [*tiny_run.arguments(run), "train.steps=100000", "launch.cpus_per_rank=4"]
    timeout = f"SlurmdTimeout={_SLURMD_TIMEOUT_SECONDS}"
    with SlurmCluster(extra_conf=[timeout]) as slurm:
        sizes = ["launch.nodes=2", "launch.ranks_per_node=1"]
        number, _ = submit(slurm, *endless, *sizes, cwd=tmp_path)
        job = Job(slurm, number, run / "submitted" / "0000" / f"{number}.log")
        wait_until_it_trains(job, run, 0)
        job.wait_until(lambda: tiny_run.events(run, "committed"), "saves", SECONDS)
        kill_node(slurm, slurm.nodes[1])
        job.wait_until(lambda: job.restarts == 1, "is requeued", SECONDS)
        job.wait_until(lambda: "down" in states(slurm), "is said to be down", SECONDS)
        page.assert_seen(f"{job.output}$ sinfo\n{states(slurm)}")
        job.cancel()
        job.wait_until_ended(SECONDS)

        assert "`launch.nodes`" in page.parts["To do"]
        newest = tiny_run.events(run, "committed")[-1]["step"]
        fewer = [*endless, "launch.nodes=1", "launch.ranks_per_node=1", f"train.steps={newest + 5}"]
        number, _ = submit(slurm, *fewer, cwd=tmp_path)
        job = Job(slurm, number, run / "submitted" / "0001" / f"{number}.log")
        assert job.wait_until_ended(SECONDS) == "COMPLETED", job.output
    assert tiny_run.steps_done(run) == newest + 5
    assert tiny_run.events(run, "resumed")[-1]["step"] == newest


def states(slurm: SlurmCluster) -> str:
    return slurm.run("sinfo", "--noheader", "--Node", "--format=%N %T").stdout
