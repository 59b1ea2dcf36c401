"""What the tests of saving share: two process trees, which start slowly, a disk, two writers."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.writers import Ranks
from tests.distributed.ranks import run_ranks
from tests.protocol.saves import Run

CASES = "tests.checkpoint.cases"

Results = list[dict[str, Any]]
"""By rank, and then by case."""

SMALL_DISK_BYTES = 600_000


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every one of the `CASES` has a directory of its own."""
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="session")
def results(root: Path, small_disk: Path | None) -> Results:
    """What the `CASES` returned."""
    disk = "" if small_disk is None else str(small_disk)
    return run_ranks(f"{CASES}:all_of_them", 2, root=str(root), small_disk=disk)


@pytest.fixture(scope="session")
def staging_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every one of the cases of staging has a directory of its own."""
    return tmp_path_factory.mktemp("staging")


@pytest.fixture(scope="session")
def staging_results(staging_root: Path) -> Results:
    """What the cases of staging returned."""
    return run_ranks("tests.checkpoint.staging_cases:all_of_them", 2, root=str(staging_root))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(Run(tmp_path), tmp_path)
    yield ranks
    ranks.end()


@pytest.fixture(scope="session")
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
