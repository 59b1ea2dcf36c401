"""The writer's end of the socket to its trainer, and the trainer's life.

Blocks only for as long as it is told to. The trainer may die, be stopped, or not listen at any
moment: what it has sent is still delivered, and what it does not take is dropped with it. Any
thread may tell; only the main thread receives.
"""

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

MESSAGE_BYTES = 64 << 10
_MAX_DESCRIPTORS = 4


class TrainerLink:
    """A socket to a trainer that may die, and a pidfd that tells when it has."""

    def __init__(self, connection: socket.socket, pidfd: int) -> None:
        self._socket = connection
        self._pidfd = pidfd
        self._unsent: list[bytes] = []
        self._sending = threading.Lock()
        self.alive = True

    def receive(
        self, timeout_seconds: float, wake_fd: int | None = None
    ) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors; None if there is none in time.

        None, too, as soon as `wake_fd`, if one is given, can be read.
        Once the trainer is dead what it has sent is still delivered, and then None at once.
        """
        watched: list[Any] = [self._socket] if wake_fd is None else [self._socket, wake_fd]
        if self.alive:
            watched.append(self._pidfd)
        ready, _, _ = select.select(watched, [], [], timeout_seconds if self.alive else 0)
        if self._pidfd in ready:
            # Not the end of the stream: forked data workers may hold the trainer's end open.
            self.alive = False
        if self._socket not in ready:
            return None
        try:
            data, descriptors = self._next()
        except ConnectionResetError:
            # The trainer died with reports unread. Linux says so once, ahead of what it had sent.
            data, descriptors = self._next()
        if not data:  # the trainer closed its end, or is about to be reported dead
            self.alive = False
            return None
        return json.loads(data), descriptors

    def _next(self) -> tuple[bytes, list[int]]:
        data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, _MAX_DESCRIPTORS)
        return data, descriptors

    def ends_within(self, timeout_seconds: float) -> bool:
        """Tell whether the trainer's process has ended, or ends in that time."""
        return bool(select.select([self._pidfd], [], [], timeout_seconds)[0])

    def tell(self, kind: str, **fields: Any) -> None:
        """Queue a message; it is sent when the trainer takes it, and dropped when it has died."""
        with self._sending:
            self._unsent.append(json.dumps({"kind": kind, **fields}).encode())
        self.flush()

    def say_alive_every(self, interval_seconds: float, under_way: Callable[[], Any]) -> None:
        """Tell the trainer, from a thread, that this process runs: an `alive` every so often.

        With it goes what `under_way` returns, as JSON of a few hundred bytes. While reports are
        queued it says nothing: the trainer does not listen anyway.
        """

        def run() -> None:
            while True:
                time.sleep(interval_seconds)
                if self._unsent:
                    continue
                try:
                    pulse = json.dumps({"kind": "alive", "under_way": under_way()}).encode()
                    self._socket.send(pulse, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError:
                    return  # the trainer has died

        threading.Thread(target=run, daemon=True).start()

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it without blocking."""
        with self._sending:
            while self._unsent:
                try:
                    self._socket.send(self._unsent[0], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except OSError:
                    self._unsent.clear()
                    return
                self._unsent.pop(0)
