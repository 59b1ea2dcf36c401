"""Exports and imports that are killed, and disks that fill up: what is left, and going on."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from engine.__main__ import main
from tests.exchange import stored
from tests.exchange.child import killed

MASTERS = {f"layer{i}": torch.full((40, 1000), float(i)) for i in range(4)}  # 160 kB each
OPTIONS = ("--dtype", "fp32", "--shard-size", "170KB")
DISK_BYTES = 400_000


@pytest.mark.parametrize("call", [1, 2, 5, 6, 8])
def test_an_export_is_killed_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: int
) -> None:
    """Each of the four files takes a header and two slices of one window: three calls."""
    source, out = stored.checkpoint(tmp_path, world_size=2, masters=MASTERS), tmp_path / "out"
    command = ("export", str(source), "--out", str(out), *OPTIONS)
    killed("engine.exchange.export:_write_at", call, *command)
    assert not out.exists()
    assert main(list(command)) == 0
    kept = (call - 1) // 3
    assert (f"{kept} of 4 shards" in capsys.readouterr().out) == (kept > 0)
    stored.assert_equal(stored.exported(out), MASTERS)
    assert sorted(os.listdir(tmp_path)) == sorted([source.name, "out"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A disk of `DISK_BYTES`, and what gives it more room: a real one where this user may mount."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.getuid() == 0:
        mount = ["mount", "-t", "tmpfs", "-o"]
        subprocess.run([*mount, f"size={DISK_BYTES}", "tmpfs", str(path)], check=True)
        try:
            yield path, lambda: _run("mount", "-o", "remount,size=4m", str(path))
        finally:
            _run("umount", "--lazy", str(path))
        return
    room, pwrite = [DISK_BYTES], os.pwrite

    def limited(descriptor: int, data: memoryview, at: int) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, at)

    with mock.patch("os.pwrite", limited):
        yield path, lambda: room.__setitem__(0, 10**9)


def test_an_export_to_a_full_disk_goes_on_once_there_is_room(
    tmp_path: Path,
    disk: tuple[Path, Callable[[], None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, make_room = disk
    source = stored.checkpoint(tmp_path / "run", world_size=2, masters=MASTERS)
    command = ["export", str(source), "--out", str(path / "out"), *OPTIONS]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"engine: {path}/.out.exporting: No space left on device. What is")
    assert os.listdir(path) == [".out.exporting"]
    make_room()
    assert main(command) == 0
    assert "2 of 4 shards" in capsys.readouterr().out
    stored.assert_equal(stored.exported(path / "out"), MASTERS)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
