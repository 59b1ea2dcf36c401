"""When a save is due: by steps, by minutes, or by a plan that follows what was measured.

Saves by step count need no word among the ranks. Everything else is rank 0's to say, at a step
edge, and is agreed by all (`launcher.stop`).
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher import interval
from launcher.checkpoint_settings import AutoSettings
from launcher.interval import Costs, Plan
from launcher.seeing import records, timeline

_REMEMBERED_SAVES = 5
_WORTH_SAYING = 0.2  # of the interval


class Planner:
    """`checkpoint=auto` on rank 0: plans anew after each commit, and says what it expects.

    Args:
        mtbf_seconds: mean time between failures, given or estimated from the run's attempts.
        say: takes a line for people, when a plan differs from the one that was said last.
    """

    def __init__(self, mtbf_seconds: float, say: Callable[[str], None]) -> None:
        self._mtbf_seconds = mtbf_seconds
        self._say = say
        self._restart_seconds = Costs.restart
        self._waited: dict[int, float] = {}
        self._pauses: deque[float] = deque(maxlen=_REMEMBERED_SAVES)
        self._persists: deque[float] = deque(maxlen=_REMEMBERED_SAVES)
        self.plan = interval.plan(Costs(), mtbf_seconds)
        self._said: Plan | None = None

    def restarted(self, seconds: float) -> None:
        """Take in how long this attempt took from its start to its first step."""
        self._restart_seconds = seconds

    def observe(self, event: Mapping[str, Any]) -> None:
        """Take in what the engine tells of a save."""
        kind, step = event.get("event"), event.get("step")
        if kind == "waited":
            self._waited[step] = event["seconds"]  # type: ignore[index]  # it always has one
        elif kind == "staged":
            self._pauses.append(event["seconds"] - self._waited.pop(step, 0.0))  # type: ignore[arg-type]
        elif kind == "committed":
            self._persists.append(event["seconds"])
            self._plan_anew()

    def _plan_anew(self) -> None:
        if not self._pauses:
            return
        costs = Costs(
            statistics.median(self._pauses),
            statistics.median(self._persists),
            self._restart_seconds,
        )
        self.plan = interval.plan(costs, self._mtbf_seconds)
        before, now = self._said, self.plan
        if before is None or not (
            1 - _WORTH_SAYING < now.interval_seconds / before.interval_seconds < 1 + _WORTH_SAYING
        ):
            self._said = now
            self._say(_words(now, costs))


def planner_of(auto: AutoSettings | None, run: Path, say: Callable[[str], None]) -> Planner | None:
    """Return the planner that `checkpoint.auto` asks for; `run` is the directory of the run."""
    if auto is None:
        return None
    if auto.mtbf_hours is not None:
        return Planner(auto.mtbf_hours * 3600, say)
    attempts = timeline.attempts_of(records.read(run, at_a_glance=True))
    return Planner(interval.estimated_mtbf_seconds(attempts), say)


def _words(plan: Plan, costs: Costs) -> str:
    disk = "; oftener than that the disk cannot" if plan.limited_by_disk else ""
    return (
        f"checkpoint=auto: a save every {plan.interval_seconds / 60:.3g} min (its pause is "
        f"{costs.pause:.3g} s, it is durable after {costs.persist:.3g} s, a failure is expected "
        f"every {plan.mtbf_seconds / 3600:.3g} h){disk}. Saves and failures should take "
        f"{plan.expected_loss:.2%} of the time."
    )


class Cadence:
    """When a save is due. The clock is asked on rank 0 only; its answer is agreed by all.

    Args:
        every_steps: multiples of it are saved.
        every_minutes: since the last save of either cause.
        planner: another interval since the last save; rank 0 only.
    """

    def __init__(
        self,
        *,
        every_steps: int | None,
        every_minutes: float | None,
        planner: Planner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else every_minutes * 60
        self._planner = planner
        self._clock = clock
        self._last_save_at = clock()

    def clock_says_save(self) -> bool:
        """Tell whether it is time, by this rank's clock."""
        since = self._clock() - self._last_save_at
        if self._planner is not None and since >= self._planner.plan.interval_seconds:
            return True
        return self._every_seconds is not None and since >= self._every_seconds

    def is_due(self, step: int, clock_said_save: bool) -> bool:
        """Tell whether the edge after a step is one to save at; equal on all ranks."""
        by_count = self._every_steps is not None and step % self._every_steps == 0
        return by_count or clock_said_save

    def begin_again(self) -> None:
        """Count the minutes from now; call it after a save, whether it succeeded or not."""
        self._last_save_at = self._clock()
