"""The beat: a sign of life that another host can read from a directory listing, and its two alarms.

Rank 0's writer keeps one empty file in its attempt's directory, and renames it now and then; count,
state and process are in the name. The same directory shows whether another start has closed the
attempt meanwhile, so every beat looks: a run that was stopped or cut off for long, and was taken
for dead, learns it from its first beat afterwards, whether or not a save is due.

Who runs what: one thread beats, so that a long fsync is not taken for death. Another one touches no
file: it says so when no beat has got through for the lease, also where the first one is stuck in
the call of a dead disk.
"""

import os
import threading
import time
from collections.abc import Callable

from engine.protocol import files
from engine.protocol.acquire import Lease
from engine.protocol.layout import CLOSED
from engine.protocol.owner import DRAINING, RUNNING, Beat, start_ticks

THREADS = "everstep-beat"
_NO_ANSWER = "no call has returned"


class BeatThread:
    """Renews rank 0's beat: one empty file whose name changes.

    Tells `beat_lost` when the lease has passed without one, `beat_restored` when one gets through
    again, and `fenced`, once and as the last thing, when the attempt is found closed.
    """

    def __init__(
        self,
        attempt_path: str,
        host: str,
        lease: Lease,
        tell: Callable[..., None],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Beat once, and take the place of a writer before this one. Raises OSError."""
        self._path = attempt_path
        self._tell = tell
        self._log = log
        self._host = host
        self._ticks = start_ticks(os.getpid()) or 0
        self._lease = lease
        self._clock = clock
        # A writer before this one may have died: count on, or its last beat stays the newest.
        left = Beat.names_of(files.fresh_listing(attempt_path))
        newest = Beat.newest(left)
        self._count = 0 if newest is None else newest.count
        self._current: str | None = None
        self._state = RUNNING
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._through_at = clock()
        self._lost = False
        self._why = _NO_ANSWER
        self._beat()
        for name in left:
            os.unlink(os.path.join(attempt_path, name))
        for run in (self._run, self._watch):
            threading.Thread(target=run, name=THREADS, daemon=True).start()

    def drain(self) -> None:
        """Say that the trainer has ended and that this writer is finishing."""
        self._state = DRAINING
        self._beat()

    def end(self) -> None:
        """Beat no more: from here on a closed attempt is this writer's own doing."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._lease.beat_seconds):
            if self._beat():
                self._look_at_attempt()

    def _watch(self) -> None:
        while not self._over.wait(self._lease.beat_seconds):
            silent = self._clock() - self._through_at
            if silent < self._lease.seconds or self._lost:
                continue
            self._lost = True
            self._tell(  # and no line in the log, which is on the same disk as a rule
                "beat_lost",
                seconds=silent,
                reason=f"no beat got through for {silent:.1f} s (the lease is "
                f"{self._lease.seconds:g} s): {self._why}. Another start may take this run over "
                f"meanwhile; this one looks as soon as {self._path} can be reached",
            )

    def _look_at_attempt(self) -> None:
        """After a beat: is the attempt still open? The beat was a change, so the listing is new."""
        try:
            closed = CLOSED in files.listing(self._path)
        except OSError as error:
            self._log(f"beat: {error}")
            return
        if closed and not self._over.is_set():
            self._over.set()
            self._tell("fenced", reason="another start has closed this attempt")
            self._log("another start has closed this attempt")
        elif self._lost:
            self._lost = False
            self._tell("beat_restored", reason="beats get through again; nobody took over")

    def _beat(self) -> bool:
        """Change the name; tell whether that got through."""
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
                if files.is_gone(error):
                    self._current = None  # somebody has tidied it away: begin another one
                self._why = str(error)
                self._log(f"beat: {error}")
                return False
            self._current = name
            self._through_at, self._why = self._clock(), _NO_ANSWER
            return True
