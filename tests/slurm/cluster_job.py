"""A batch job of a test cluster: what Slurm says about it, and waiting for that to change."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.slurm.cluster import SlurmCluster

_RESTART_SECONDS = 2
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}


class ClusterError(Exception):
    """A daemon did not start, a command failed, or a state did not come in time."""


def wait_for(
    predicate: Callable[[], object], seconds: float, what: str, report: Callable[[], str] = str
) -> None:
    """Poll ``predicate`` until it is true.

    Raises:
        ClusterError: with ``what`` and ``report()``, if it is not true in time.
    """
    deadline = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > deadline:
            raise ClusterError(f"not within {seconds:g} s: {what}\n{report()}")
        time.sleep(0.05)


@dataclass(frozen=True)
class Job:
    """A batch job of ``cluster``; ``log`` is its output."""

    cluster: SlurmCluster
    id: str
    log: Path

    def show(self) -> dict[str, str]:
        """What Slurm says about the job: the fields of ``scontrol show job``."""
        line = self.cluster.run("scontrol", "--oneliner", "show", "job", self.id).stdout
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED ... as Slurm spells it."""
        return self.show()["JobState"]

    @property
    def restarts(self) -> int:
        """How often the job was requeued."""
        return int(self.show()["Restarts"])

    @property
    def output(self) -> str:
        """The job's output so far, of all its runs."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_until(self, predicate: Callable[[], object], what: str, seconds: float = 60) -> None:
        """Wait for ``predicate``; the error shows the job, its output and the daemons' logs."""
        wait_for(predicate, seconds, f"job {self.id}: {what}", self._report)

    def wait_until_ended(self, seconds: float = 60) -> str:
        """Wait until the job has ended for good; return its state. Requeues do not take long."""
        self.wait_until(lambda: self._hurry() in _ENDED, "ends", seconds)
        return self.state

    def wait_until_restarted(self, restarts: int = 1, seconds: float = 60) -> None:
        """Wait until the job runs for the ``restarts``-th time after its first."""
        self.wait_until(
            lambda: self._hurry() == "RUNNING" and self.restarts >= restarts,
            f"runs again ({restarts})",
            seconds,
        )

    def cancel(self, *options: str) -> None:
        """Run ``scancel`` on the job."""
        self.cluster.run("scancel", *options, self.id)

    def requeue(self) -> None:
        """Run ``scontrol requeue`` on the job."""
        self.cluster.run("scontrol", "requeue", self.id)

    def _hurry(self) -> str:
        """Return the state; let a job that waits after a requeue start soon."""
        shown = self.show()
        if (shown["JobState"], shown["Reason"]) == ("PENDING", "BeginTime"):
            wait = datetime.fromisoformat(shown["EligibleTime"]) - datetime.now()
            if wait > timedelta(seconds=_RESTART_SECONDS + 1):
                # Not "now": in the second of the requeue a new credential counts as revoked
                # like the old one, and Slurm ends the job for good ("non-startable").
                start = f"StartTime=now+{_RESTART_SECONDS}"
                self.cluster.run("scontrol", "update", f"JobId={self.id}", start, check=False)
        return shown["JobState"]

    def _report(self) -> str:
        return f"{self.show()}\n--- output\n{self.output}\n{self.cluster.logs()}"
