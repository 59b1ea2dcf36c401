"""Private daemons for tests: started as children, ended with the test process.

``start`` asks the kernel to end the daemon with this process, so that an aborted test run leaves
none. What a daemon starts in turn carries a variable that only it knows, by which ``kill_marked``
finds the leftovers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# Debian keeps daemons where an ordinary user's PATH does not look.
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def find(program: str) -> str | None:
    """Return the program's path, or None."""
    return shutil.which(program, path=PATH)


def missing(programs: Sequence[str]) -> list[str]:
    """Name those that this machine lacks; ``start`` itself needs setpriv."""
    return [name for name in (*programs, "setpriv") if find(name) is None]


def start(
    stack: contextlib.ExitStack,
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    output: IO[str] | IO[bytes] | int,
) -> subprocess.Popen[bytes]:
    """Start a daemon that stays in the foreground; ``stack`` ends it. Main thread only."""
    daemon = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", "--", *command],
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    stack.callback(_end, daemon)
    return daemon


def marked(name: str, value: str | Path) -> list[int]:
    """Return every other process whose environment holds this variable with this value."""
    mark = f"{name}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # another user's, or gone
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def kill_marked(name: str, value: str | Path) -> None:
    """Kill every other process whose environment holds this variable with this value."""
    for pid in marked(name, value):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(15)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
