"""Room for what is to come: refused with numbers where there is none, said where it is short."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.checkpoint import memory, old_writers, preflight
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.handover import BACKLOG
from engine.checkpoint.memory import Room
from engine.checkpoint.options import CheckpointOptions
from engine.checkpoint.session import Session
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.local import LocalDisk

_HERE = preflight._this_host()
_ELSEWHERE = _HERE - 1
_BLOCK = 4096


class _Agreement:
    """Rank 0's, of ranks whose answers are known: (host, shard bytes) by rank."""

    def __init__(self, rows: list[list[int]], rank: int) -> None:
        self._rows = rows
        self._rank = rank

    def gather(self, numbers: list[int]) -> list[list[int]]:
        assert numbers == self._rows[self._rank]
        return self._rows

    def require(self, reason: str, error: type[Exception]) -> None:
        if reason:
            raise error(reason)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How much memory and disk there is; enough, unless a test says otherwise."""
    host = SimpleNamespace(memory_bytes=1 << 40, free_blocks=1 << 20, blocks=1 << 30)
    monkeypatch.setattr(memory, "room", lambda: Room(host.memory_bytes, "the test's limit"))
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: SimpleNamespace(
            f_bavail=host.free_blocks, f_frsize=_BLOCK, f_blocks=host.blocks
        ),
    )
    return host


def _check(
    root: Path,
    shards: list[tuple[int, int]],
    keep_last: int = 2,
    rank: int = 0,
    local: LocalDisk | None = None,
) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    session = SimpleNamespace(
        agreement=_Agreement([list(row) for row in shards], rank),
        rank=rank,
        attempt=1,
        directory=CheckpointDirectory(str(root)),
        local=local,
        emit=lambda event, **fields: events.append((event, fields)),
    )
    options = CheckpointOptions(keep_last=keep_last, commit_deadline_seconds=60)
    preflight.check(cast(Session, session), shards[rank][1], options)
    return events


def test_two_images_of_every_rank_of_this_host_must_fit(
    tmp_path: Path, host: SimpleNamespace
) -> None:
    shards = [(_HERE, 1000), (_ELSEWHERE, 90_000), (_HERE, 3000)]
    host.memory_bytes = 8000
    assert _check(tmp_path, shards) == []
    host.memory_bytes = 7999
    with pytest.raises(CheckpointError) as raised:
        _check(tmp_path, shards)
    for part in ("8000 bytes", "2 ranks", "7999 are free", "the test's limit", "launch.ranks"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("tags", "keep_last", "least", "wanted"),
    [(0, 2, 2, 3), (1, 2, 1, 2), (2, 2, 1, 1), (5, 2, 1, 1), (0, 1, 2, 2), (1, 4, 1, 4)],
)
def test_the_disk_must_hold_two_checkpoints_and_should_hold_one_more_than_are_kept(
    tmp_path: Path, host: SimpleNamespace, tags: int, keep_last: int, least: int, wanted: int
) -> None:
    """Those that are there already are counted: they make way for new ones."""
    for step in range(tags):
        (tmp_path / f"global_step{step}").mkdir()
    (tmp_path / "latest").touch()
    shards = [(_HERE, 7 * _BLOCK), (_ELSEWHERE, 3 * _BLOCK)]
    host.free_blocks = 10 * least - 1
    with pytest.raises(CheckpointError) as raised:
        _check(tmp_path, shards, keep_last)
    numbers = (10 * _BLOCK, f"{tags} are in {tmp_path}", host.free_blocks * _BLOCK)
    for part in ("checkpoint.dir", *numbers, 10 * least * _BLOCK):
        assert str(part) in str(raised.value)
    host.free_blocks = 10 * wanted
    assert _check(tmp_path, shards, keep_last) == []
    if wanted > least:
        host.free_blocks -= 1
        ((event, fields),) = _check(tmp_path, shards, keep_last)
        assert event == "low_space"
        assert fields["needed_bytes"] == 10 * wanted * _BLOCK
        assert fields["free_bytes"] == host.free_blocks * _BLOCK
        assert f"checkpoint.keep_last={keep_last}" in fields["reason"]


def test_a_nodes_own_disk_should_hold_the_saves_that_may_wait_there(
    tmp_path: Path, host: SimpleNamespace
) -> None:
    """Said once for each node, and never a reason not to start."""
    shards = [(_ELSEWHERE, 100 * _BLOCK), (_HERE, 7 * _BLOCK), (_HERE, 3 * _BLOCK)]
    local = LocalDisk(str(tmp_path), 1, len(shards))
    host.free_blocks = (BACKLOG + 1) * 10
    assert _check(tmp_path, shards, rank=1, local=local) == []
    host.free_blocks -= 1
    assert _check(tmp_path, shards, rank=2, local=local) == []
    ((event, fields),) = _check(tmp_path, shards, rank=1, local=local)
    assert event == "low_space"
    assert fields["needed_bytes"] == (BACKLOG + 1) * 10 * _BLOCK
    assert fields["free_bytes"] == host.free_blocks * _BLOCK
    assert "checkpoint.local_dir" in fields["reason"]
    host.blocks = host.free_blocks = 0
    assert _check(tmp_path, shards, rank=1, local=local) == []


def test_a_disk_that_does_not_say_how_large_it_is_passes(
    tmp_path: Path, host: SimpleNamespace
) -> None:
    host.free_blocks = host.blocks = 0
    assert _check(tmp_path, [(_HERE, 1000)]) == []


def test_both_lacks_are_said_at_once(tmp_path: Path, host: SimpleNamespace) -> None:
    host.memory_bytes = host.free_blocks = 1
    with pytest.raises(CheckpointError, match=r"staging needs 2 images.*; checkpoint.dir has no"):
        _check(tmp_path, [(_HERE, _BLOCK)])


@pytest.fixture
def start_writer(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a process whose output is the log of a writer of an attempt, as a writer's is."""
    started = []

    def start(attempt: int, holds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        log = Path(CheckpointDirectory(str(tmp_path)).attempt(attempt).path, "writer_00001.log")
        log.parent.mkdir(parents=True)
        command = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, pass_fds=holds
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_where_memory_is_short_an_earlier_attempts_stopped_writer_is_ended(
    tmp_path: Path,
    host: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    start_writer: Callable[..., subprocess.Popen[bytes]],
) -> None:
    old, own, newer = (start_writer(attempt) for attempt in (0, 1, 2))
    old.send_signal(signal.SIGSTOP)
    _check(tmp_path, [(_HERE, 1000)])
    assert old.poll() is None, "there is enough"
    monkeypatch.setattr(memory, "room", lambda: Room(0 if old.poll() is None else 2000, "limit"))
    _check(tmp_path, [(_HERE, 1000)])
    assert old.poll() == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="staging needs 2 images"):
        _check(tmp_path, [(_HERE, 1001)])
    assert own.poll() is newer.poll() is None


def test_an_image_is_freed_although_the_process_that_holds_it_lives(
    start_writer: Callable[..., subprocess.Popen[bytes]],
) -> None:
    image = os.memfd_create("everstep-image")
    other = os.memfd_create("everstep-draft")
    for descriptor in (image, other):
        os.ftruncate(descriptor, 1 << 20)
    process = start_writer(0, holds=(image, other))
    old_writers.truncate_images(process.pid)
    assert process.poll() is None
    assert (os.fstat(image).st_size, os.fstat(other).st_size) == (0, 1 << 20)
    for descriptor in (image, other):
        os.close(descriptor)


def test_a_disk_that_cannot_be_asked_is_an_error_on_all_ranks(
    tmp_path: Path, host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(os, "statvfs", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        _check(tmp_path, [(_HERE, 1000)])
