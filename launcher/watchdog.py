"""Ends a rank whose start, resume, step or save takes longer than its limit.

A rank that waits for ever in a collective, for a disk or for a data set costs the whole allocation.
Each phase has a limit of its own: a long save must not trip the limit of a step. When one is over,
every thread's stack goes to this rank's log and, a moment later, the process ends with a failure.
The other ranks, which wait for it in the same phase, do the same in that moment, so that all stacks
are on record: they feel the first process's end at once.

Who runs what: the training thread enters and leaves phases, which is two assignments; a daemon
thread looks at the clock once a second. A call that never lets go of the interpreter's lock stops
that thread, too: some time after the limit faulthandler, which needs no lock, ends the process.
"""

import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from launcher.launch_settings import PHASES, LaunchSettings

LOCKED_MARGIN_SECONDS = 60.0
_LOOK_EVERY_SECONDS = 1.0
_OTHERS_SECONDS = 3 * _LOOK_EVERY_SECONDS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limit:
    """The most seconds that a phase may take, and the setting that says so."""

    seconds: float
    setting: str


def limits_of(launch: LaunchSettings) -> dict[str, Limit]:
    """Return the limits of a rank's phases: start, resume, step and save."""
    minutes = {phase: getattr(launch, f"{phase}_timeout_minutes") for phase in PHASES}
    return {
        phase: Limit(value * 60, f"launch.{phase}_timeout_minutes={value:g}")
        for phase, value in minutes.items()
    }


@dataclass(frozen=True)
class _Phase:
    name: str
    deadline: float


class Watchdog:
    """Watches the training thread; `watch` starts it.

    Args:
        limits: by the phase's name.
        fail: ends the process with a text for the terminal; called on the watchdog's own thread.
    """

    def __init__(
        self,
        limits: Mapping[str, Limit],
        fail: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limits = limits
        self._fail = fail
        self._clock = clock
        self._sleep = sleep
        self._phase: _Phase | None = None
        self._watched = threading.get_ident()

    def watch(self) -> None:
        """Begin; the calling thread is the one that is watched."""
        self._watched = threading.get_ident()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Hold what happens inside to the limit of phase `name`. Phases do not nest."""
        seconds = self._limits[name].seconds
        self._phase = _Phase(name, self._clock() + seconds)
        faulthandler.dump_traceback_later(
            seconds + LOCKED_MARGIN_SECONDS, exit=True, file=sys.stderr
        )
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._phase = None

    def look(self) -> None:
        """End the process if the phase under way is over its limit."""
        phase = self._phase
        if phase is None or self._clock() < phase.deadline:
            return
        stacks = _stacks()
        if phase is not self._phase:
            return  # it came to its end while the stacks were taken
        setting = self._limits[phase.name].setting
        own = stacks.get(self._watched, "")
        logger.info("every thread's stack:\n%s", "\n".join(stacks.values()))
        self._sleep(_OTHERS_SECONDS)
        if phase is not self._phase:
            logger.warning("%s was over %s, and came to its end all the same", phase.name, setting)
            return
        self._fail(
            f"everstep: {phase.name} took longer than {setting}; this is where:\n{own}"
            "The logs of all ranks have the stacks of all their threads."
        )

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_SECONDS)
            self.look()


def _stacks() -> dict[int, str]:
    """Return the stack of every Python thread, by its identifier."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        ident: f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    }
