"""The beat: a sign of life that another host can read from a directory listing.

Rank 0's writer keeps one empty file in its attempt's directory, and renames it now and then; count,
state and process are in the name. A thread does it, so that a long fsync is not taken for death.
"""

import os
import threading
import time
from collections.abc import Callable

from engine.protocol import files
from engine.protocol.owner import DRAINING, RUNNING, Beat, start_ticks


class BeatThread:
    """Renews rank 0's beat: one empty file whose name changes."""

    def __init__(
        self, attempt_path: str, host: str, interval_seconds: float, log: Callable[[str], None]
    ) -> None:
        self._path = attempt_path
        self._log = log
        self._host = host
        self._ticks = start_ticks(os.getpid()) or 0
        self._interval_seconds = interval_seconds
        # A writer before this one may have died: count on, or its last beat stays the newest.
        left = Beat.names_of(files.fresh_listing(attempt_path))
        newest = Beat.newest(left)
        self._count = 0 if newest is None else newest.count
        self._current: str | None = None
        self._state = RUNNING
        self._lock = threading.Lock()
        self._beat()
        for name in left:
            os.unlink(os.path.join(attempt_path, name))
        threading.Thread(target=self._run, daemon=True).start()

    def drain(self) -> None:
        """Say that the trainer has ended and that this writer is finishing."""
        self._state = DRAINING
        self._beat()

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_seconds)
            self._beat()

    def _beat(self) -> None:
        with self._lock:
            self._count += 1
            beat = Beat(self._count, self._state, os.getpid(), self._ticks, self._host)
            name = os.path.join(self._path, beat.name())
            try:
                if self._current is None:
                    files.touch(name)
                else:
                    os.rename(self._current, name)
            except OSError as error:
                self._log(
                    f"beat: {error}"
                )  # a missed beat is a fact for others, not a failure of ours
                return
            self._current = name
