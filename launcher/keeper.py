"""The outer process of a rank: forks the trainer, and outlives it until its writer is done.

A starter such as srun takes a rank's end as the end of everything in it; with the usual cgroup
tracking whatever still runs is killed 10 ms later. So the process that the starter knows is this
one. It imports nothing heavy, forwards signals, watches the starters above it, reaps, waits for
the writer, and then ends exactly as the trainer ended: the same exit code, or the same signal.

Who runs what: the keeper is single-threaded and forks once, before the heavy imports. The child
returns from `keep` as the trainer and holds the write end of a pipe, which the writer inherits;
the keeper knows that both are gone when the pipe reads end-of-file. The trainer may write lines to
it: `limit SECONDS`, the most that its writer can need, and `gone PATH`, a file that the keeper is
to make when both are gone, so that nobody waits for a rank whose processes were all killed.

Signals: TERM, INT, HUP and USR2 are passed on. USR1 becomes USR2, because NCCL may use USR1 in the
trainer. QUIT kills the trainer, and the writer still finishes. A starter that vanishes counts as
one TERM.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from launcher.wakeup import SignalQueue

WRITER_LIMIT_SECONDS = 660.0
"""Used until the trainer says otherwise: the default commit deadline and a minute."""

_PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGUSR1: signal.SIGUSR2,
    signal.SIGQUIT: signal.SIGKILL,
}
_STARTER_MODULES = ("deepspeed.launcher.launch", "deepspeed.launcher.runner")
_STARTER_FILES = ("deepspeed/launcher/launch.py", "deepspeed/launcher/runner.py", "bin/deepspeed")
_PR_SET_PDEATHSIG = 1


def keep(starter_pid: int | None = None) -> int:
    """Fork; return the pipe's write end in the child, and never return in the parent.

    Args:
        starter_pid: the parent this process should have, if it knows; another one means that the
            starter died before the parent-death signal was set.
    """
    starter = starter_pid or os.getppid()
    handled = {*_PASSED_ON, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    _ask_for_parent_death_signal()
    orphaned = os.getppid() != starter
    read_end, write_end = os.pipe()
    keeper_pid = os.getpid()
    trainer_pid = os.fork()
    if trainer_pid == 0:
        os.close(read_end)
        _become_trainer(keeper_pid, write_end)
        return write_end
    os.close(write_end)
    _Keeper(trainer_pid, read_end, watch=starter_pid).run(orphaned)


def tell_limit(keeper_fd: int, seconds: float) -> None:
    """Tell the keeper, from the trainer, how long its writer may need at most."""
    os.write(keeper_fd, f"limit {seconds:.3f}\n".encode("ascii"))


def starters_above(pid: int) -> list[int]:
    """Return the ancestors of a process that are DeepSpeed's launch or runner."""
    found = []
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        if is_starter(words):
            found.append(pid)
        pid = int(status.rpartition(")")[2].split()[1])
    return found


def is_starter(command: Sequence[str]) -> bool:
    """Say whether a command line is that of `deepspeed` or of its per-node launcher.

    Only the interpreter's script or module counts: a rank's own arguments may name anything.
    """
    return any(word in _STARTER_MODULES or word.endswith(_STARTER_FILES) for word in command[:4])


class _Keeper:
    """The parent's side, from the fork to its own end."""

    def __init__(self, trainer_pid: int, read_end: int, watch: int | None) -> None:
        self._trainer_pid = trainer_pid
        self._pipe: int | None = read_end
        self._status: int | None = None
        self._limit_seconds = WRITER_LIMIT_SECONDS
        self._gone_sign: bytes | None = None
        self._received = b""
        self._signals = SignalQueue((*_PASSED_ON, signal.SIGCHLD))
        watched = {*starters_above(os.getppid()), *([watch] if watch else [])}
        self._starters = [fd for pid in watched if (fd := _open_pidfd(pid)) is not None]
        self._starter_lost = len(self._starters) < len(watched)

    def run(self, orphaned: bool) -> NoReturn:
        self._signals.unblock()
        if orphaned or self._starter_lost:
            self._signal_trainer(signal.SIGTERM)
        while self._status is None:
            self._wait_for_events(None)
        deadline = time.monotonic() + self._limit_seconds
        while self._pipe is not None and (left := deadline - time.monotonic()) > 0:
            self._wait_for_events(left)
        if self._pipe is None and self._gone_sign is not None:
            self._leave(self._gone_sign)
        _end_as(self._status)

    def _leave(self, sign: bytes) -> None:
        with contextlib.suppress(OSError):  # where the attempt is over, nobody waits for it
            os.close(os.open(sign, os.O_CREAT | os.O_WRONLY, 0o644))

    def _wait_for_events(self, timeout: float | None) -> None:
        poll = select.poll()
        pipe = [] if self._pipe is None else [self._pipe]
        for fd in (self._signals.fd, *self._starters, *pipe):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(None if timeout is None else timeout * 1000):
            if fd == self._signals.fd:
                self._take_signals()
            elif fd == self._pipe:
                self._read_pipe(fd)
            else:
                self._starters.remove(fd)
                os.close(fd)
                self._signal_trainer(signal.SIGTERM)

    def _take_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGCHLD:
                self._reap()
            else:
                self._signal_trainer(_PASSED_ON[number])

    def _reap(self) -> None:
        """Reap every child: as PID 1 of a container, orphans of the trainer come here too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._trainer_pid:
                    self._status = status

    def _signal_trainer(self, number: int) -> None:
        if self._status is None:  # not reaped yet, so the pid is still the trainer's
            os.kill(self._trainer_pid, number)

    def _read_pipe(self, fd: int) -> None:
        data = os.read(fd, 4096)
        if not data:
            os.close(fd)
            self._pipe = None
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            word, _, value = line.partition(b" ")
            if word == b"limit":
                self._limit_seconds = float(value)
            elif word == b"gone":
                self._gone_sign = value


def _become_trainer(keeper_pid: int, write_end: int) -> None:
    """Set up the child: end with the keeper, and keep the pipe out of forked data workers."""
    _ask_for_parent_death_signal()
    if os.getppid() != keeper_pid:
        os._exit(1)  # the keeper died before the parent-death signal was set
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGQUIT})
    held = [write_end]

    def close_in_forked_process() -> None:
        while held:  # once: further down the family the number may name another file
            os.close(held.pop())

    os.register_at_fork(after_in_child=close_in_forked_process)


def _ask_for_parent_death_signal() -> None:
    """Have the kernel send SIGTERM when the parent's thread that started this process ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _end_as(status: int) -> NoReturn:
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the trainer left its own core file
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # PID 1 of a container does not die of signals that it sends itself
