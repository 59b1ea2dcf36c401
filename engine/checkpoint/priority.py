"""Low priority for the writer: it takes the processor and the disk when training leaves them free.

Run by the writer's main thread before it starts others, which inherit both.
"""

import ctypes
import os
import platform
from collections.abc import Callable

_NICENESS = 10
# ioprio_set(2) has no wrapper in libc, and its number differs by architecture.
_IOPRIO_SET = {
    "x86_64": 251,
    "aarch64": 30,
    "riscv64": 30,
    "loongarch64": 30,
    "ppc64le": 273,
    "s390x": 282,
}
_WHO_PROCESS = 1
# Best effort, the lowest of its eight levels. Not idle: behind a job that keeps the disk busy, an
# idle writer would never come to its commit deadline.
_LOWEST = 2 << 13 | 7


def lower(log: Callable[[str], None], machine: str = platform.machine()) -> None:
    """Lower the calling thread's priorities; what the machine refuses is logged and left."""
    try:
        os.nice(_NICENESS)
    except OSError as error:
        log(f"processor priority stays as it is: {error}")
    number = _IOPRIO_SET.get(machine)
    if number is None:
        log(f"I/O priority stays as it is: no system call number is known for {machine}")
        return
    if ctypes.CDLL(None, use_errno=True).syscall(number, _WHO_PROCESS, 0, _LOWEST) != 0:
        log(f"I/O priority stays as it is: {os.strerror(ctypes.get_errno())}")
