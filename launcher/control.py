"""Control by file: `touch runs/NAME/SAVE` or `touch runs/NAME/STOP`, from any machine.

Rank 0 looks into the run directory, at most once a second, and what it finds travels with the
agreement of the next step edge. SAVE is removed when it is seen; STOP only when what it led to is
committed, so that a run which dies on the way does not train on when it is started again: a STOP
file at start is refused until somebody removes it.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ConfigError

SAVE = "SAVE"
STOP = "STOP"

LOOK_EVERY_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """What the files in the run directory ask for."""

    save: bool = False
    stop: bool = False


class ControlFiles:
    """Looks for the files of one run. Rank 0's training thread only; never raises for the disk."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._looked_at = clock() - LOOK_EVERY_SECONDS

    def look(self) -> Asked:
        """Return what is asked for; nothing in between two looks."""
        now = self._clock()
        if now - self._looked_at < LOOK_EVERY_SECONDS:
            return Asked()
        self._looked_at = now
        try:
            # A listing: network clients remember for long that a single name was not there.
            names = os.listdir(self._directory)
        except OSError as error:
            logger.warning("cannot look for %s and %s: %s", SAVE, STOP, error)
            return Asked()
        return Asked(save=SAVE in names and self._remove(SAVE), stop=STOP in names)

    def stop_is_done(self) -> None:
        """Remove STOP: the run has ended as it asked."""
        self._remove(STOP)

    def _remove(self, name: str) -> bool:
        try:
            (self._directory / name).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be removed, so it is not followed: %s", name, error)
            return False
        return True


def refuse_leftover_stop(directory: Path) -> None:
    """Raise ConfigError if a STOP file is there before the run starts."""
    path = directory / STOP
    if path.exists():
        raise ConfigError(
            f"{path} is there, so the run does not start: somebody asked it to stop. "
            "Remove the file and start again."
        )
