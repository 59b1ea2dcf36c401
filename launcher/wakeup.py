"""Signals as readable bytes, so that one poll can wait for signals and descriptors alike.

For the single-threaded outer processes (the starter and the keeper) only: it takes over the
process's handlers and its one wakeup descriptor. No signal is lost or acted on in between: numbers
queue up in a pipe until `take`.
"""

import os
import signal
from collections.abc import Iterable


class SignalQueue:
    """Receives the given signals from now on; `unblock` lets those in that came before."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = frozenset(numbers)
        self.seen = False
        """Some signal was taken."""
        self.fd, write_end = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in self._numbers:
            signal.signal(number, lambda *_: None)  # without a handler no byte is written

    def unblock(self) -> None:
        """Let in the signals that the process blocked until now, those that came meanwhile too."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)

    def take(self) -> list[signal.Signals]:
        """Return the signals since the last call; call it when `fd` is readable."""
        taken = [signal.Signals(number) for number in os.read(self.fd, 4096)]
        self.seen = self.seen or bool(taken)
        return taken
