"""Start the ranks on this machine, and end as they end.

The starter imports no torch. It starts one process per rank from its main thread (each rank asks
for a signal when that thread dies), passes stop signals on to all of them at once, and reaps every
one before it returns. When a rank ends badly the others get a grace time to fail by themselves,
then SIGQUIT: each keeper kills its trainer but still waits for its writer. After a failure, and if
no signal asked it to end, it starts them all again as often as it is told to: each time an attempt,
which resumes.

A terminal's Ctrl-C reaches every process by itself; that the starter passes it on as well changes
nothing, because a rank only notes that it was asked to stop.
"""

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import requeue
from launcher.wakeup import SignalQueue

RANKS_WITHOUT_ACCELERATOR = 2

PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGUSR1: signal.SIGUSR2,
    signal.SIGQUIT: signal.SIGQUIT,
}
# Deaths that a rank brings on itself or that befall it; SIGABRT as a rule follows a peer's death.
_CAUSES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def default_ranks() -> int:
    """Return the number of accelerators of this machine, or two where there is none.

    Torch counts them in a process of its own, and only where a device file says there might be
    one: the starter itself stays small, and holds no device.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        return RANKS_WITHOUT_ACCELERATOR
    count = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(count.stdout) or RANKS_WITHOUT_ACCELERATOR


def run_local(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    signals: SignalQueue,
    *,
    ranks: int,
    grace_seconds: float,
    max_restarts: int,
) -> int:
    """Run `python -m launcher` with the given arguments once per rank; block until all have ended.

    Args:
        signals: has taken over `PASSED_ON`.

    Returns:
        The verdict that the ranks agreed on, or the exit code of the rank that failed first.
    """
    command = [sys.executable, "-m", "launcher", *arguments]
    return run_ranks(
        command,
        environ,
        signals,
        ranks=ranks,
        grace_seconds=grace_seconds,
        max_restarts=max_restarts,
    )


def run_ranks(
    command: Sequence[str],
    environ: Mapping[str, str],
    signals: SignalQueue,
    *,
    ranks: int,
    grace_seconds: float,
    max_restarts: int = 0,
) -> int:
    """Run a command once per rank; see `run_local`. Main thread only."""
    environ = {**environ, "EVERSTEP_LAUNCH_ID": secrets.token_hex(4)}
    for restarts_left in range(max_restarts, -1, -1):
        group = _run_once(command, environ, signals, ranks=ranks, grace_seconds=grace_seconds)
        if group.code in requeue.VERDICTS or group.was_signalled or not restarts_left:
            break
        _say(f"starting again; {restarts_left} of launch.max_restarts={max_restarts} were left")
    return group.code


def _run_once(
    command: Sequence[str],
    environ: Mapping[str, str],
    signals: SignalQueue,
    *,
    ranks: int,
    grace_seconds: float,
) -> "_Group":
    """Run all ranks to their end, and say what went wrong."""
    # Blocked signals stay blocked in the ranks until their keepers are ready for them; one that
    # comes between two attempts waits, and is passed on to the next.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON.keys())
    with tempfile.TemporaryDirectory(prefix="everstep-") as directory, _listen() as listener:
        group = _Group(
            [
                _start(command, environ, rank, ranks, listener, Path(directory))
                for rank in range(ranks)
            ],
            grace_seconds,
        )
        listener.close()
        signals.unblock()
        group.wait(signals)
        group.report()
        return group


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    error_file: Path
    code: int | None = None
    """As in `subprocess`: negative for a signal. None while it runs."""
    ended_by_us: bool = False

    def error(self) -> tuple[float, str] | None:
        """When, and of what, the trainer failed, if it could say so."""
        try:
            text = self.error_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        content = json.loads(text)
        return content["time"], content["text"]


class _Group:
    """The ranks of this machine, from the start of the last to the end of the last."""

    def __init__(self, ranks: list[_Rank], grace_seconds: float) -> None:
        self._ranks = ranks
        self._grace_seconds = grace_seconds
        self._quit_at: float | None = None
        self.was_signalled = False
        self.code = requeue.FAILED
        """The verdict, or of the rank that failed first: 128 + n for a signal n. See `report`."""

    def wait(self, signals: SignalQueue) -> None:
        poll = select.poll()
        poll.register(signals.fd, select.POLLIN)
        by_fd = {rank.pidfd: rank for rank in self._ranks}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while by_fd:
            for fd, _ in poll.poll(self._milliseconds_left()):
                if fd == signals.fd:
                    for number in signals.take():
                        self.was_signalled = True
                        self._signal_all(PASSED_ON[number])
                else:
                    poll.unregister(fd)
                    self._has_ended(by_fd.pop(fd))
            if self._quit_at is not None and time.monotonic() >= self._quit_at:
                self._quit_at = None
                self._quit_the_rest()

    def report(self) -> None:
        """Find the exit code, and say what went wrong, the first failure last."""
        failed = [rank for rank in self._ranks if rank.code not in requeue.VERDICTS]
        if not failed:
            self.code = next(
                v for v in requeue.VERDICTS if v in {rank.code for rank in self._ranks}
            )
            return
        if sys.stderr.isatty() and failed[0].rank == 0 and (failed[0].code or 0) < 0:
            print(file=sys.stderr)  # killed, it could not end the line with its bar
        first = min(failed, key=_order_of_blame)
        for rank in failed:
            if rank is not first:
                _say(f"rank {rank.rank} {_ending(rank)}")
        error = first.error()
        _say(f"rank {first.rank} failed first: it {_ending(first)}")
        if error is not None:
            print(error[1].rstrip(), file=sys.stderr)
        assert first.code is not None
        self.code = first.code if first.code > 0 else 128 - first.code

    def _milliseconds_left(self) -> float | None:
        if self._quit_at is None:
            return None
        return max(0.0, self._quit_at - time.monotonic()) * 1000

    def _has_ended(self, rank: _Rank) -> None:
        rank.code = rank.process.wait()
        os.close(rank.pidfd)
        if rank.code != requeue.DONE and self._quit_at is None and not rank.ended_by_us:
            self._quit_at = time.monotonic() + self._grace_seconds

    def _quit_the_rest(self) -> None:
        for rank in self._ranks:
            rank.ended_by_us = rank.code is None
        self._signal_all(signal.SIGQUIT)

    def _signal_all(self, number: int) -> None:
        for rank in self._ranks:
            if rank.code is None:
                rank.process.send_signal(number)


def _start(
    command: Sequence[str],
    environ: Mapping[str, str],
    rank: int,
    ranks: int,
    listener: socket.socket,
    directory: Path,
) -> _Rank:
    error_file = directory / f"rank_{rank:05d}.json"
    host, port = listener.getsockname()
    variables = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "LOCAL_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "PYTHONPATH": _python_path(environ),
        "EVERSTEP_STARTER_PID": os.getpid(),
        "EVERSTEP_ERROR_FILE": error_file,
    }
    if rank == 0:  # inherits the bound socket: between here and there nobody can take the port
        variables["EVERSTEP_LISTEN_FD"] = listener.fileno()
    process = subprocess.Popen(
        command,
        env={
            "GLOO_SOCKET_IFNAME": "lo",  # gloo otherwise wants the host's name to resolve
            **environ,
            **{name: str(value) for name, value in variables.items()},
        },
        stdin=subprocess.DEVNULL,
        pass_fds=[listener.fileno()] if rank == 0 else [],
    )
    return _Rank(rank, process, os.pidfd_open(process.pid), error_file)


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def _python_path(environ: Mapping[str, str]) -> str:
    """Have the ranks find the packages that this process runs, wherever it found them."""
    root = str(Path(__file__).resolve().parent.parent)
    rest = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return os.pathsep.join(dict.fromkeys([root, *rest]))


def _order_of_blame(rank: _Rank) -> tuple[int, float]:
    """Sort key: the rank that the others failed because of comes first."""
    if rank.ended_by_us:
        return (3, 0.0)
    if rank.code is not None and rank.code < 0 and -rank.code in _CAUSES:
        return (0, 0.0)
    error = rank.error()
    return (1, error[0]) if error is not None else (2, 0.0)


def _ending(rank: _Rank) -> str:
    if rank.ended_by_us:
        return "was ended because another rank had failed"
    assert rank.code is not None
    if rank.code >= 0:
        return f"ended with exit code {rank.code}"
    name = signal.Signals(-rank.code).name
    hint = " (out of memory? see the kernel's log)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _say(text: str) -> None:
    print(f"everstep: {text}", file=sys.stderr)
