"""What the ranks of all attempts tell the driver: one pipe, drained whenever the driver waits.

A rank that dies leaves what it has told in the pipe. Writers are held by a pidfd from the event
that names them: a pid that is used again is never signalled.
"""

import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from engine.protocol.owner import start_ticks

Event = dict[str, Any]

_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # what ranks tell while the driver reads a checkpoint


class Process:
    """A process that is not the driver's own child: a writer, or a fork of a trainer."""

    def __init__(self, pid: int, ticks: int) -> None:
        self.pid = pid
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        if start_ticks(pid) != ticks:
            self.forget()

    @property
    def alive(self) -> bool:
        return not self.wait(0)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for its end; False if it has not come in time."""
        if self._pidfd is None:
            return True
        ready, _, _ = select.select([self._pidfd], [], [], timeout_seconds)
        if ready:
            self.forget()
        return bool(ready)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> bool:
        """Signal it; tell whether it was there to be signalled."""
        if self._pidfd is None or not self.alive:
            return False
        signal.pidfd_send_signal(self._pidfd, number)
        return True

    def forget(self) -> None:
        """Let go of its descriptor."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class Events:
    """All events of a chain, in the order of their coming, and the processes that they name."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._rest = b""
        self.of_key: dict[int, list[Event]] = {}
        self.writers: dict[int, list[tuple[int, Process]]] = {}  # key -> (rank, writer)
        self.children: list[Process] = []
        self._scheduled: list[tuple[float, Callable[[], None]]] = []

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)

    def processes(self) -> list[Process]:
        """Return everything that ranks have left running, dead or alive."""
        writers = [writer for of_key in self.writers.values() for _, writer in of_key]
        return [*writers, *self.children]

    def drain(self) -> None:
        """Take in all that has been told by now."""
        while True:
            try:
                data = os.read(self._read_end, _READ_BYTES)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def schedule(self, seconds: float, action: Callable[[], None]) -> None:
        """Do `action` that much later, in whatever wait the driver is then."""
        self._scheduled.append((time.monotonic() + seconds, action))

    def run(self, seconds: float) -> None:
        """Let the ranks run for a while: the random moments of the fault model."""
        self.wait(lambda: False, seconds)

    def wait(self, ready: Callable[[], bool], timeout_seconds: float) -> bool:
        """Drain until `ready`; False if the time is over."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self.drain()
            self._do_scheduled()
            if ready():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            # Not every end that `ready` may look for comes with an event: look now and then.
            select.select([self._read_end], [], [], min(left, 0.02))

    def told(self, key: int, kind: str) -> list[Event]:
        """Return the events of one kind of one start."""
        return [event for event in self.of_key.get(key, []) if event["event"] == kind]

    def _do_scheduled(self) -> None:
        now = time.monotonic()
        due = [action for moment, action in self._scheduled if moment <= now]
        self._scheduled = [later for later in self._scheduled if later[0] > now]
        for action in due:
            action()

    def _take(self, event: Event) -> None:
        self.of_key.setdefault(event["key"], []).append(event)
        if event["event"] in ("writer", "child") and event["ticks"] is not None:
            process = Process(event["pid"], event["ticks"])
            if event["event"] == "writer":
                self.writers.setdefault(event["key"], []).append((event["rank"], process))
            else:
                self.children.append(process)
