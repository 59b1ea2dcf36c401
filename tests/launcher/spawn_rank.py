"""A stand-in for `python -m launcher` as a rank: says who it is, and does what it is told.

    python spawn_rank.py ACTION_OF_RANK_0 ACTION_OF_RANK_1 ...

Actions: a number is an exit code; `killed`, `killed_at_its_bar` and `aborted` are deaths by a
signal; `fails` leaves an error and exits with 1; `waits` goes on until a signal, which it says;
`stuck` ignores all but QUIT; `dies_of_a_signal` fails when one comes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

from launcher.stop import STOP_SIGNALS


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main() -> None:
    rank = int(os.environ["RANK"])
    action = sys.argv[1 + rank]
    received: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda n, _: received.append(n))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    say(f"rank {rank} pid {os.getpid()}")
    if action.isdigit():
        sys.exit(int(action))
    if action == "fails":
        with open(os.environ["EVERSTEP_ERROR_FILE"], "w", encoding="utf-8") as file:
            json.dump({"time": time.time(), "text": f"error of rank {rank}"}, file)
        sys.exit(1)
    if action == "killed_at_its_bar":
        os.write(2, b"\r 10%|#         | step")
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "aborted":
        os.kill(os.getpid(), signal.SIGABRT)
    if action == "variables":
        names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR")
        say(f"variables {rank} " + " ".join(os.environ[name] for name in names))
        if rank == 0:
            listener = socket.socket(fileno=int(os.environ["EVERSTEP_LISTEN_FD"]))
            say(f"port is ours: {listener.getsockname()[1] == int(os.environ['MASTER_PORT'])}")
        sys.exit(0)
    while not received or action == "stuck":
        signal.pause()
    if action == "dies_of_a_signal":
        sys.exit(1)
    say(f"rank {rank} got {signal.Signals(received[0]).name}")
    sys.exit(75)


if __name__ == "__main__":
    main()
