"""A follower in a thread of its own: the step loop never waits for a monitor, nor fails with it.

The training thread calls what is public; `_run` and what it calls is of the new thread. What goes
wrong becomes news, for the training thread to ask for, and the monitor is tried again later.
"""

import threading
from collections import deque
from typing import Any

from launcher.monitors.follower import Follower

_LOOK_EVERY_SECONDS = 5.0
_BETWEEN_SLICES_SECONDS = 0.05
_RETRY_AFTER_SECONDS = 60.0
_THREAD_NAME = "monitor"


class FollowerThread:
    """Runs one follower, from `start` until it is asked to end."""

    def __init__(self, follower: Follower) -> None:
        self.name = follower.name
        self._follower = follower
        self._news: deque[dict[str, Any]] = deque()
        self._failures = 0  # since it last worked
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"{_THREAD_NAME} {follower.name}", daemon=True
        )

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread.ident is None:
            self._thread.start()

    def news(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def ask_to_end(self) -> None:
        """Have it show what is recorded by now, and end."""
        self._ends.set()

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, for so long at most; tell whether it has."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ends.wait(self._advance()):
            pass
        while self._follow():
            pass
        self._follower.give_up()

    def _advance(self) -> float:
        """Show a slice; return how long to wait until the next."""
        more = self._follow()
        if self._failures:
            return _RETRY_AFTER_SECONDS
        return _BETWEEN_SLICES_SECONDS if more else _LOOK_EVERY_SECONDS

    def _follow(self) -> bool:
        try:
            more = self._follower.catch_up()
        except Exception as error:  # whatever a monitor raises, training goes on
            self._follower.give_up()
            self._failures += 1
            if self._failures == 1:
                cause = f"{type(error).__name__}: {error}".splitlines()[0]
                self._tell("monitor_failed", reason=cause)
            return False
        if self._failures:
            self._tell("monitor_works_again", failures=self._failures)
            self._failures = 0
        return more

    def _tell(self, event: str, **details: Any) -> None:
        self._news.append({"event": event, "monitor": self.name, **details})


def any_left_behind() -> bool:
    """Tell whether a monitor of this process is still at work, such as waiting for a network."""
    return any(thread.name.startswith(_THREAD_NAME) for thread in threading.enumerate())
