"""The keeper's pipe in a program that `python -m launcher.keep` has started.

The keeper waits until nobody holds the pipe's write end any more, so the program must hold it, hand
it to its writer, and keep it from everybody else. It learns of it by an environment variable, which
says the pipe's identity too: where another program stands between, the descriptor is closed or
names something else, and then a save that was fully staged would not be safe.
"""

import os
import stat
from collections.abc import Mapping
from functools import cache

from engine.checkpoint.errors import CheckpointError

VARIABLE = "EVERSTEP_KEEPER"


def describe(descriptor: int) -> str:
    """Return the variable's value for a pipe."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def inherited(environment: Mapping[str, str]) -> int | None:
    """Return the descriptor that the variable names, None where it is not set.

    From then on no process that this one starts or forks has it but by `pass_fds`.

    Raises CheckpointError: it is not the keeper's pipe.
    """
    value = environment.get(VARIABLE)
    if value is None:
        return None
    try:
        descriptor = int(value.partition(":")[0])
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode) or describe(descriptor) != value:
            raise ValueError("it names something else here")
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{VARIABLE}={value} is not the pipe of a keeper: {error}. A program between it and "
            "this one has closed it. Let a keeper start each rank itself: python -m launcher.keep "
            "-- python train.py"
        ) from error
    _keep_from_others(descriptor)
    return descriptor


@cache  # each attempt of a process asks
def _keep_from_others(descriptor: int) -> None:
    os.set_inheritable(descriptor, False)
    held = [descriptor]

    def close_in_forked_process() -> None:
        while held:  # once: further down the family the number may name another file
            os.close(held.pop())

    os.register_at_fork(after_in_child=close_in_forked_process)
