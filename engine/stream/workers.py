"""The life of a loader's worker processes: sheltered from signals, identified, never left over.

Who runs what: the trainer calls `sheltered_start` around the fork and owns `WorkerLog`; a worker
calls `settle` first thing, and `WorkerLog.begin` before each sample.

- Schedulers and terminals signal every process of a job. The trainer must be able to finish its
  step and save, so its workers ignore the signals that ask for a stop.
- A worker inherits every descriptor of the trainer, among them those whose closing tells others
  that the trainer is gone. It therefore dies at once with the trainer, by the parent-death signal.
- What a worker was reading is in memory it shares with the trainer, so that even a segmentation
  fault inside a decoder can be reported with the sample that caused it.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import signal
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NOTHING = -1


class WorkerLog:
    """Which sample offset each worker is reading, in memory shared across the fork."""

    _SLOT = struct.Struct("<q")

    def __init__(self, workers: int) -> None:
        self._shared = mmap.mmap(-1, max(1, workers) * self._SLOT.size)
        for worker in range(workers):
            self.end(worker)

    def begin(self, worker: int, sample_offset: int) -> None:
        """Note, in a worker, that it starts to read a sample."""
        self._SLOT.pack_into(self._shared, worker * self._SLOT.size, sample_offset)

    def end(self, worker: int) -> None:
        """Note, in a worker, that it is between samples."""
        self.begin(worker, _NOTHING)

    def reading(self, worker: int) -> int | None:
        """Return the sample offset a worker is, or was last, reading; None between samples."""
        (sample_offset,) = self._SLOT.unpack_from(self._shared, worker * self._SLOT.size)
        return None if sample_offset == _NOTHING else int(sample_offset)


@contextmanager
def sheltered_start() -> Iterator[None]:
    """Hold the ignored signals back while workers start, and keep the trainer's SIGCHLD handler.

    A worker inherits the blocked mask, and lifts it in `settle`: no signal finds it half set up.

    torch (2.6 to 2.13) installs a SIGCHLD handler that raises RuntimeError wherever the main
    thread happens to be, in the middle of a step or a save. Without it the death of a worker is
    found where its batch is waited for, within seconds.
    """
    on_child = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if on_child is not None:
            signal.signal(signal.SIGCHLD, on_child)


def settle(trainer_pid: int) -> None:
    """Make the calling process a worker: ignore signals, and die with the trainer."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != trainer_pid:  # it died before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def kill(workers: Iterable[BaseProcess]) -> None:
    """Send SIGKILL to the workers that have not been waited for. They hold nothing to lose."""
    for worker in workers:
        worker.kill()


def join_ended(workers: Sequence[BaseProcess], timeout_seconds: float) -> None:
    """Wait until a worker begins to end, for so long at most, and reap those that do."""
    ending = wait([worker.sentinel for worker in workers], timeout_seconds)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join()


def end(workers: Iterable[BaseProcess]) -> None:
    """Kill the workers, and wait until they are gone."""
    for worker in workers:
        worker.kill()
        worker.join()


def end_at_exit(workers: Sequence[BaseProcess]) -> Callable[[], None]:
    """End the workers when the trainer's interpreter ends; return what takes that back.

    multiprocessing would send them SIGTERM, which they ignore, and then wait for ever.
    """
    end_these = partial(end, workers)
    atexit.register(end_these)
    return partial(atexit.unregister, end_these)
