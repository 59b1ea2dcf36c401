"""`python -m launcher.keep`: a keeper around a command that knows nothing of the launcher."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# A trainer that gives the pipe to a "writer", which holds it until its standard input ends.
HOLDS = """
import os, signal, subprocess, sys
from engine.checkpoint import keeper_pipe
pipe = keeper_pipe.inherited(os.environ)
writer = "import os; print('writer', flush=True); os.read(0, 1); print('done', flush=True)"
subprocess.Popen([sys.executable, "-c", writer], pass_fds=[pipe])
print("trainer", flush=True)
signal.pause()
"""
# A forked process that lives on, as a data worker would, must not hold the keeper.
FORKS = """
import os, sys
from engine.checkpoint import keeper_pipe
assert keeper_pipe.inherited(os.environ) == keeper_pipe.inherited(os.environ)
if os.fork() == 0:
    os.close(1)
    os.read(0, 1)
    os._exit(0)
sys.exit(3)
"""
WAITS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
signal.pause()
"""
BETWEEN = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"
ASKS = "import os; from engine.checkpoint import keeper_pipe; keeper_pipe.inherited(os.environ)"


def keep(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.keep", "--", *command],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_stays_until_the_writer_is_done_and_ends_as_the_command_did() -> None:
    with keep(sys.executable, "-c", HOLDS) as process:
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {"trainer\n", "writer\n"}
        process.send_signal(signal.SIGQUIT)  # which kills the trainer
        keeper = os.pidfd_open(process.pid)
        assert not select.select([keeper], [], [], 0.3)[0], "the writer still holds the pipe"
        assert process.stdin is not None
        process.stdin.close()
        assert process.stdout.readline() == "done\n"
        assert process.wait() == -signal.SIGKILL
        os.close(keeper)


def test_a_forked_process_does_not_hold_it() -> None:
    with keep(sys.executable, "-c", FORKS) as process:
        assert process.wait() == 3


def test_a_signal_reaches_the_command() -> None:
    with keep(sys.executable, "-c", WAITS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 75


def test_a_pipe_that_was_lost_on_the_way_is_an_error() -> None:
    with keep(sys.executable, "-c", BETWEEN, "-c", ASKS) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert "A program between it and this one has closed it" in errors


@pytest.mark.parametrize("value", ["0:0", "x", "-1:5", "99:1"])
def test_a_variable_that_names_no_pipe_is_an_error(value: str) -> None:
    from engine.checkpoint import keeper_pipe
    from engine.checkpoint.errors import CheckpointError

    with pytest.raises(CheckpointError, match="is not the pipe of a keeper"):
        keeper_pipe.inherited({keeper_pipe.VARIABLE: value})
    assert keeper_pipe.inherited({}) is None


def test_a_command_that_is_not_there_is_refused() -> None:
    with keep("no-such-program-9") as process:
        _, errors = process.communicate()
    assert process.returncode == 78
    assert "there is no program 'no-such-program-9'" in errors
