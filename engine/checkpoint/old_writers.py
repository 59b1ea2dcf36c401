"""Take back the memory that writers of earlier attempts still hold on this host.

Once a newer attempt has resumed, everything that they staged is adopted or swept, and whatever they
still write leads nowhere; but each of them may hold two images, and one that was stopped, or hangs
on a dead disk, holds them for ever.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress

from engine.protocol.layout import CheckpointDirectory

_END_SECONDS = 5.0
_IMAGE = "/memfd:everstep-image"


def reclaim(directory: CheckpointDirectory, attempt: int) -> list[int]:
    """End the writers of attempts before `attempt`; return their pids.

    One that the kernel holds in a system call does not end: its images are cut to nothing instead,
    which fails that call when the disk comes back.
    """
    found = list(_writers(directory, attempt))
    for pid in found:
        with suppress(ProcessLookupError):
            if not _kill(pid):
                truncate_images(pid)
    return found


def truncate_images(pid: int) -> None:
    """Free the memory of all images that process `pid` holds, whoever else maps them."""
    descriptors = f"/proc/{pid}/fd"
    with suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(descriptors):
            path = os.path.join(descriptors, name)
            if os.readlink(path).startswith(_IMAGE):
                os.truncate(path, 0)


def _writers(directory: CheckpointDirectory, attempt: int) -> Iterator[int]:
    """Find them by their standard output, which is a log in their attempt's directory."""
    attempts = os.path.realpath(directory.attempts) + os.sep
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            output = os.readlink(f"/proc/{name}/fd/1")
        except OSError:
            continue  # it has ended, or is another user's
        number = output.removeprefix(attempts).partition(os.sep)[0]
        if output.startswith(attempts) and number.isdigit() and int(number) < attempt:
            yield int(name)


def _kill(pid: int) -> bool:
    """Kill a process, stopped or not; tell whether it has ended."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return bool(select.select([pidfd], [], [], _END_SECONDS)[0])
    finally:
        os.close(pidfd)
