"""`python -m launcher.keep [--writer-seconds S] -- COMMAND`: a keeper for any training program.

A loop of one's own that uses `engine.attach` has writers that outlive it. Where whatever is left of
a rank is killed when its process ends (srun's task, a container's first process), this one takes
its place: it runs COMMAND as its child, passes signals on, waits until the writer is done, and ends
as the command did. See `launcher.keeper`, and docs/own-loop.md.
"""

import argparse
import os
import shutil
import signal
import sys
from typing import NoReturn

from engine.checkpoint import keeper_pipe
from launcher import keeper, requeue


def main() -> NoReturn:
    """Become the keeper, with the command in a child. Does not return."""
    parser = argparse.ArgumentParser(
        prog="python -m launcher.keep", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--writer-seconds",
        type=float,
        default=keeper.WRITER_LIMIT_SECONDS,
        help="wait for the writer so long at most; a minute more than commit_deadline_seconds",
    )
    parser.add_argument("command", nargs="+", help="the program and its arguments, after --")
    arguments = parser.parse_args()
    program = shutil.which(arguments.command[0])
    if program is None:
        print(f"everstep: there is no program {arguments.command[0]!r}", file=sys.stderr)
        sys.exit(requeue.BAD_CONFIG)
    pipe = keeper.keep()
    # From here on this is the child: the parent has become the keeper.
    keeper.tell_limit(pipe, arguments.writer_seconds)
    os.set_inheritable(pipe, True)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # blocked by `keep`, and kept by exec
    environment = {**os.environ, keeper_pipe.VARIABLE: keeper_pipe.describe(pipe)}
    os.execve(program, arguments.command, environment)


if __name__ == "__main__":
    main()
