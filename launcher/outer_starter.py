"""Ranks that `srun` or `deepspeed` starts for us: run it, stop it kindly, read the verdict.

The program runs in a session of its own, so that a terminal's Ctrl-C reaches the ranks through
us alone: once, as a request to save and stop. It is never signalled but by the caller's `pass_on`,
and what it returns is believed only where rank 0 left no verdict (`launcher.starter_link`).
"""

import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from launcher import requeue
from launcher.starter_link import BEAT_SECONDS, StarterSide
from launcher.wakeup import SignalQueue

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGUSR1)

Command = Callable[[Mapping[str, str]], Sequence[str]]
IsNoise = Callable[[bytes], bool]
PassOn = Callable[["subprocess.Popen[bytes]"], None]


def run(
    command: Command,
    environ: MutableMapping[str, str],
    signals: SignalQueue,
    *,
    run_directory: Path,
    max_restarts: int,
    pass_on: PassOn | None = None,
    is_noise: IsNoise | None = None,
) -> int:
    """Start the ranks by a command, again after failures as often as allowed; block to their end.

    Args:
        command: from variables that every rank needs to the command line; the variables are in the
            program's environment as well.
        environ: this process's; its status file gets the last word on the ranks.
        signals: has taken over `STOP_SIGNALS`.
        pass_on: what else to do with a stop than to ask for it by file, if there is something.
        is_noise: which lines of the program's output the terminal is spared.

    Returns:
        Rank 0's verdict; without one, the program's exit code, or 1 where that is 0.
    """
    launch_id = secrets.token_hex(4)
    for restarts_left in range(max_restarts, -1, -1):
        with StarterSide(run_directory, f"{launch_id}.{max_restarts - restarts_left}") as link:
            variables = {
                "EVERSTEP_LINK": str(link.path),
                "EVERSTEP_LAUNCH_ID": launch_id,
            }
            process = subprocess.Popen(
                command(variables),
                env={**environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=None if is_noise is None else subprocess.PIPE,
                start_new_session=True,
            )
            echo = None if is_noise is None else _echo(process, is_noise)
            was_signalled = _Watch(process, link, signals, pass_on).wait()
            if echo is not None:
                echo.join()
            code = _report(link, process)
            if said := link.status():
                requeue.write_status(environ, said)
        if code in requeue.VERDICTS or was_signalled or not restarts_left:
            break
        print(
            f"everstep: starting again; {restarts_left} of launch.max_restarts={max_restarts} "
            "were left",
            file=sys.stderr,
        )
    return code


def _echo(process: "subprocess.Popen[bytes]", is_noise: IsNoise) -> threading.Thread:
    """Copy the program's output to ours, line by line, on a thread that ends with it."""

    def copy() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not is_noise(line):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()

    thread = threading.Thread(target=copy, name="echo", daemon=True)
    thread.start()
    return thread


class _Watch:
    """Waits for the program, shows it that we live, and passes on what we are asked."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        link: StarterSide,
        signals: SignalQueue,
        pass_on: PassOn | None,
    ) -> None:
        self._process = process
        self._link = link
        self._signals = signals
        self._pass_on = pass_on
        self._was_signalled = False

    def wait(self) -> bool:
        """Return whether a signal asked for the end."""
        pidfd = os.pidfd_open(self._process.pid)
        poll = select.poll()
        for fd in (pidfd, self._signals.fd):
            poll.register(fd, select.POLLIN)
        beat_at = time.monotonic() + BEAT_SECONDS
        while self._process.poll() is None:
            ready = poll.poll(max(0.0, beat_at - time.monotonic()) * 1000)
            if self._signals.fd in (fd for fd, _ in ready):
                self._ask_to_stop()
            if time.monotonic() >= beat_at:
                self._link.beat()
                beat_at = time.monotonic() + BEAT_SECONDS
        os.close(pidfd)
        return self._was_signalled

    def _ask_to_stop(self) -> None:
        for number in self._signals.take():
            self._was_signalled = True
            self._link.ask_to_stop(number.name)
            if self._pass_on is not None:
                self._pass_on(self._process)


def _report(link: StarterSide, process: "subprocess.Popen[bytes]") -> int:
    """Say why ranks failed, the first failure last, and return the exit code."""
    for rank, text in link.failures():
        print(f"everstep: rank {rank} failed:\n{text.rstrip()}", file=sys.stderr)
    status = link.status()
    if status.isdecimal():
        return int(status)
    code = process.returncode
    how = "before the ranks met" if not status else "and left no verdict"
    program = Path(str(process.args[0] if isinstance(process.args, list) else process.args)).name
    print(f"everstep: {program} ended with exit code {code} {how}.", file=sys.stderr)
    return 128 - code if code < 0 else code or requeue.FAILED
