"""What Slurm knows of the job that a rank runs in: when it has to end, and why it was told to.

Rank 0 asks, twice in its life: at its start for the end of the job's time, and after its last save
for the cause of a stop. A controller that does not answer costs the answer, never the run.
"""

import datetime
import logging
import re
import subprocess
import time
from collections.abc import Callable, Mapping

from launcher.launch_settings import LaunchSettings, SlurmLaunch

USUAL_LEAD_SECONDS = 120.0
"""Of slurm/train.sbatch."""

_SCONTROL_SECONDS = 20

logger = logging.getLogger(__name__)


class SlurmJob:
    """The job, or the task of an array, that a process runs in.

    Args:
        environ: has SLURM_JOB_ID; see `of`.
        signal_lead_seconds: so long before its end Slurm sends SIGUSR2.
    """

    def __init__(
        self, environ: Mapping[str, str], signal_lead_seconds: float = USUAL_LEAD_SECONDS
    ) -> None:
        self._environ = environ
        self._signal_lead_seconds = signal_lead_seconds
        # A task of an array must be named as such: the last one's own id is the whole array's.
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        self.id = f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]
        self._restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))

    @classmethod
    def of(cls, environ: Mapping[str, str], launch: LaunchSettings) -> "SlurmJob | None":
        """Return the job that the environment names, if it names one."""
        if not environ.get("SLURM_JOB_ID"):
            return None
        if isinstance(launch, SlurmLaunch):
            return cls(environ, launch.signal_lead_seconds)
        return cls(environ)

    def end_time(self) -> float | None:
        """Return when the job's time is over, in seconds since the epoch; None if that is unknown.

        Slurm sets SLURM_JOB_END_TIME from 23.02 on.
        """
        told = self._environ.get("SLURM_JOB_END_TIME", "")
        if told.isdecimal():
            return float(told)
        return _timestamp(self._show().get("EndTime", ""))

    def why_stopped(self, cause: str) -> str:
        """Return the cause of a stop with what Slurm says about it."""
        shown = self._show()
        if not shown:
            return cause
        end = _timestamp(shown.get("EndTime", ""))
        state, reason = shown.get("JobState", ""), shown.get("Reason", "")
        if shown.get("PreemptTime", "None")[0].isdigit():
            why = "preempted"
        elif int(shown.get("Restarts", "0")) > self._restarts:
            why = "requeued by Slurm"
        elif reason == "TimeLimit" or (cause == "SIGUSR2" and self._is_near(end)):
            why = "time limit"
        elif state in ("COMPLETING", "CANCELLED"):
            why = "cancelled"
        else:
            return cause
        return f"{cause} ({why})"

    def _is_near(self, end: float | None) -> bool:
        """Slurm sends the signal with that much time left, or a little less."""
        return end is not None and end - time.time() <= self._signal_lead_seconds

    def _show(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`; empty if it does not answer."""
        try:
            done = subprocess.run(
                ["scontrol", "--oneliner", "show", "job", self.id],
                env={**self._environ, "SLURM_TIME_FORMAT": "standard"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SCONTROL_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("Slurm does not say how job %s stands: %s", self.id, error)
            return {}
        return dict(re.findall(r"(\w+)=(\S*)", done.stdout))


class TimeLimit:
    """Says when a job's time is nearly over; `look` is cheap.

    Args:
        end_time: in seconds since the epoch.
        lead_seconds: so long before that there is a reason to stop.
    """

    CAUSE = "the time limit of the Slurm job"

    def __init__(
        self, end_time: float, lead_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._stop_at = end_time - lead_seconds
        self._clock = clock

    def look(self) -> str | None:
        """Return why to stop, if it is time."""
        return self.CAUSE if self._clock() >= self._stop_at else None


def _timestamp(text: str) -> float | None:
    """Read Slurm's local time; it writes Unknown where there is no limit."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
