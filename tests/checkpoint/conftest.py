"""Fixtures of the tests of saving."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL_DISK_BYTES = 600_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of a few hundred kilobytes."""
    if os.getuid() != 0:
        pytest.skip("mounting a tmpfs takes root")
    mounted = tmp_path / "disk"
    mounted.mkdir()
    options = f"size={SMALL_DISK_BYTES},nr_inodes=10000"  # only the space is to run out
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mounted)], check=True)
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)
