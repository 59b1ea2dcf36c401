"""A disk that is full at start, and one that fills up: real ENOSPC, on a small file system."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.incidents.page import incident
from tests.incidents.shell import Shell

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.getuid() != 0, reason="mounting a tmpfs takes root"),
]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def leave(disk: Path, size_bytes: int) -> None:
    """Have somebody else's file take all but so much."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(disk) - size_bytes)


def free_bytes(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def test_a_full_disk(disk: Path) -> None:
    page = incident("The disk is full")
    shell = Shell(disk)
    leave(disk, 600_000)
    said = shell.run(f"{shell.train} train.steps=100", 78)
    assert said.count("checkpoint.dir has no room for two checkpoints") == 1, "once for all ranks"
    assert not (shell.run_directory / "metrics.jsonl").exists()
    (checkpoint,) = map(int, re.findall(r"a checkpoint has (\d+) bytes", said))

    leave(disk, checkpoint * 5 // 2)  # two checkpoints, and no third on its way
    shell.run(f"{shell.train} train.steps=100", 1)
    page.assert_seen(shell.evidence())
    checkpoints = shell.run_directory / "checkpoints"
    assert {path.name for path in checkpoints.glob("global_step*")} == {
        "global_step5",
        "global_step10",
    }
    assert not list(checkpoints.rglob(".attempts/**/*.safetensors")), "files of failed saves"

    shell.run(page.command("rm"))
    shell.run(f"{shell.train} train.steps=30 checkpoint.keep_last=1")
    shell.run("python -m engine verify runs/NAME --all")
    assert {path.name for path in checkpoints.glob("global_step*")} == {"global_step30"}
