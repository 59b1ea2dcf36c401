"""A rank's keeper with a stand-in trainer, and writer, that say what happens to them.

    python keeper_process.py SCENARIO

Everything is said on standard output, one line at a time; a line that is read is an event.
The trainer ends when its standard input does, unless the scenario says otherwise.
"""

from __future__ import annotations

import os
import signal
import sys

from launcher import keeper


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def hold_until_input_ends() -> None:
    while os.read(0, 1):
        pass


def start_writer(keeper_fd: int) -> None:
    """Fork a process that holds the pipe and outlives the trainer, as the engine's writer does."""
    os.dup(keeper_fd)  # the trainer's at-fork hook closes the other one in every forked process
    if os.fork() == 0:
        say(f"writer {os.getpid()}")
        hold_until_input_ends()
        say("writer done")
        os._exit(0)


def main(scenario: str) -> None:
    say(f"keeper {os.getpid()}")
    starter = os.environ.get("EXPECTED_STARTER")
    keeper_fd = keeper.keep(int(starter) if starter else None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda n, _: say(f"got {signal.Signals(n).name}"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    if scenario.startswith("writer"):
        os.dup(keeper_fd)  # not closed by the at-fork hook
        start_writer(keeper_fd)
    if "GONE_SIGN" in os.environ:
        os.write(keeper_fd, f"gone {os.environ['GONE_SIGN']}\n".encode())
    if scenario == "writer-limit":
        keeper.tell_limit(keeper_fd, 0.2)
    if scenario == "worker" and os.fork() == 0:
        say(f"worker {os.getpid()}")
        hold_until_input_ends()
        os._exit(0)
    say(f"trainer {os.getpid()}")
    if scenario == "exit":
        os._exit(75)
    if scenario.endswith("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
