"""Run a function on several real gloo ranks, each a process of its own.

The function is named "package.module:function" and gets the test's JSON arguments. A rank that
fails ends the others, and its traceback is the test's failure.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_TIMEOUT_SECONDS = 240.0
_AFTER_FAILURE_SECONDS = 5.0


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what a rank needs to know, on top of this process's environment."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }


def free_port() -> int:
    """Return a port of the loopback that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_ranks(
    function: str,
    world_size: int,
    *,
    exit_code: int = 0,
    timeout_seconds: float = _TIMEOUT_SECONDS,
    **arguments: Any,
) -> list[Any]:
    """Run `function` on every rank; return what each returned (JSON), by rank.

    Ranks that are to end with another `exit_code`, such as that of a signal, return nothing.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch:
        ranks = []
        for rank in range(world_size):
            result = os.path.join(scratch, f"result{rank}")
            command = [
                sys.executable,
                "-m",
                "tests.distributed.rank_main",
                function,
                result,
                json.dumps(arguments),
            ]
            log = open(os.path.join(scratch, f"log{rank}"), "w+b")  # noqa: SIM115  # read below
            environment = rank_environment(rank, world_size, port)
            ranks.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log), log))
        _wait(ranks, timeout_seconds)
        texts = []
        for process, log in ranks:
            log.seek(0)
            texts.append((process.returncode, log.read().decode(errors="replace")))
            log.close()
        failed = [
            f"--- rank {r}: exit {c}\n{t[-6000:]}"
            for r, (c, t) in enumerate(texts)
            if c != exit_code
        ]
        assert not failed, "\n".join(failed)
        if exit_code:
            return []
        return [
            json.loads(Path(scratch, f"result{rank}").read_text()) for rank in range(world_size)
        ]


def _wait(ranks: list[Any], timeout_seconds: float) -> None:
    """Return when all have ended; kill the others soon after the first failure."""
    deadline = time.monotonic() + timeout_seconds
    while any(process.poll() is None for process, _ in ranks):
        if any(process.poll() for process, _ in ranks):
            deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_SECONDS)
        if time.monotonic() > deadline:
            for process, _ in ranks:
                process.kill()
        time.sleep(0.02)
