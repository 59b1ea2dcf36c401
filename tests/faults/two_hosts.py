"""Two mounts of one directory that cache what they have seen, as two hosts of a network file system
do: bindfs, a FUSE file system, with the kernel keeping entries and attributes for a while.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests import daemons
from tests.slurm.cluster_job import wait_for

_CACHING = "attr_timeout=3,entry_timeout=3,negative_timeout=3"


def why_not() -> str | None:
    """Return why this machine cannot have such mounts; None if it can."""
    absent = daemons.missing(["bindfs"])
    if absent:
        return f"not installed: {absent}"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error}"
    return None


@contextlib.contextmanager
def two_views(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Mount; yield the real directory, and the two paths by which two hosts see it."""
    real = root / "real"
    views = [root / "host-a", root / "host-b"]
    for path in (real, *views):
        path.mkdir()
    with contextlib.ExitStack() as stack, open(root / "bindfs.log", "wb") as log:
        for view in views:
            daemons.start(
                stack,
                ["bindfs", "-f", "-o", _CACHING, real, view],
                environment=os.environ,
                output=log,
            )
            stack.callback(subprocess.run, ["umount", "--lazy", view], check=False)
            wait_for(view.is_mount, 30, f"{view} is mounted")
        yield real, [str(view) for view in views]
