"""Fixtures of the tests of saving."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL_DISK_BYTES = 600_000


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A real file system of a few hundred kilobytes; None where it cannot be mounted."""
    if os.getuid() != 0:
        yield None
        return
    mounted = tmp_path_factory.mktemp("disk")
    options = f"size={SMALL_DISK_BYTES},nr_inodes=10000"  # only the space is to run out
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mounted)], check=True)
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)
