"""Run one command of `python -m engine` in a process of its own: to measure it, or to kill it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

# Not ru_maxrss: that outlives an exec, and would be the parent's.
_SCRIPT = r"""
import json, re, sys, time
import engine.exchange.export
from engine.__main__ import main

def peak():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmHWM:\s+([0-9]+) kB", status.read())[1])

before, started = peak(), time.perf_counter()
assert main(sys.argv[1:]) == 0
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "extra_peak_bytes": peak() - before}))
"""


@dataclass(frozen=True)
class Measured:
    """How long the command took, and its peak memory beyond that of a process about to start it."""

    seconds: float
    extra_peak_bytes: int


def measured(*arguments: str) -> Measured:
    """Run the command; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


# Replaces a function by one that kills its process at its n-th call.
_KILLING = """
import importlib, os, signal, sys
from engine.__main__ import main
name, count = sys.argv[1], int(sys.argv[2])
module, _, function = name.partition(":")
module = importlib.import_module(module)
original, calls = getattr(module, function), []
def dying(*arguments):
    calls.append(arguments)
    if len(calls) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
setattr(module, function, dying)
main(sys.argv[3:])
"""


def killed(function: str, call: int, *arguments: str) -> None:
    """Run a command in a process that SIGKILLs itself at the given call of a function."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLING, function, str(call), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
