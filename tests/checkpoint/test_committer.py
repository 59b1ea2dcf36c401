"""Rank 0's commits, without processes: what they wait for; what they cost at thousands of ranks."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.committer import Committer
from engine.checkpoint.under_way import Tally
from engine.format import names
from engine.format.manifest import Receipt
from engine.protocol import commit, files
from engine.protocol.layout import MANIFEST
from engine.protocol.retention import Retention
from tests.protocol.driver.content import make_draft, read_whole
from tests.protocol.saves import NONCE, WORLD_SIZE, Run, Save

_MANY = 4096


class Clock:
    """The committer's time, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Told:
    """A committer of attempt 0 and what it has reported."""

    def __init__(self, run: Run, clock: Callable[[], float], world_size: int = WORLD_SIZE) -> None:
        self.reports: list[dict[str, Any]] = []
        self.tally = Tally()
        self.committer = Committer(
            run.directory,
            0,
            world_size,
            Retention(2),
            60.0,
            lambda kind, **fields: self.reports.append({"kind": kind, **fields}),
            self.tally,
            lambda line: None,
            clock,
        )

    def add(self, save: Save, sealed_at: float, failure: str | None = None) -> None:
        self.committer.add(save.name, save.draft.draft_json(), sealed_at, failure)

    def kinds(self) -> list[str]:
        return [report["kind"] for report in self.reports]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.attempt(0)
    return run


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_commit_is_timed_from_the_seal(run: Run, clock: Clock) -> None:
    save, told = run.save(0, 10, ranks=[0]), Told(run, clock)
    told.add(save, sealed_at=clock.now - 7.0)
    assert told.reports == []
    (waiting,) = told.tally.as_json()
    assert (waiting["done"], waiting["total"]) == (1, WORLD_SIZE)
    save.write(1)
    clock.now += 5.0
    told.committer.serve()
    assert not told.committer.pending
    assert told.tally.as_json() == []
    (report,) = told.reports
    assert (report["kind"], report["seconds"]) == ("committed", 12.0)
    read_whole(run.directory.tag("global_step10"))


def test_polling_slows_down_while_nothing_moves(run: Run, clock: Clock) -> None:
    save, told = run.save(0, 10, ranks=[0]), Told(run, clock)
    told.add(save, clock.now)
    pauses = []
    for _ in range(20):
        told.committer.serve()
        pauses.append(told.committer.poll_seconds)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.1
    assert pauses[-1] == 0.5
    save.write(1)
    told.committer.serve()
    assert told.committer.poll_seconds < 0.1


def test_the_deadline_names_the_silent_ranks(run: Run, clock: Clock) -> None:
    save, told = run.save(0, 10, ranks=[0]), Told(run, clock)
    told.add(save, clock.now)
    clock.now += 59.9
    told.committer.serve()
    assert told.reports == []
    clock.now += 0.2
    told.committer.serve()
    (report,) = told.reports
    assert report["kind"] == "abandoned"
    assert "ranks [1] gave no receipt in commit_deadline_seconds=60" in report["reason"]
    assert files.listing(run.directory.attempt(0).open) == ["trash"]


def test_a_receipt_that_came_just_before_its_writer_left_counts(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, told = run.save(0, 10, ranks=[0]), Told(run, clock)
    told.add(save, clock.now)
    real, looks = files.fresh_listing, []

    def write_after_the_first_look(directory: str) -> list[str]:
        listed = real(directory)
        looks.append(directory)
        if looks == [save.path]:
            save.write(1)
            files.touch(run.directory.attempt(0).gone(1))
        return listed

    monkeypatch.setattr(files, "fresh_listing", write_after_the_first_look)
    told.committer.serve()
    assert told.reports == []
    told.committer.serve()
    assert told.kinds() == ["committed"]


def test_a_damaged_receipt_costs_that_save(run: Run, clock: Clock) -> None:
    save, told = run.save(0, 10), Told(run, clock)
    path = Path(save.path, names.receipt_name(1, WORLD_SIZE))
    path.write_bytes(path.read_bytes().replace(b'"rank":1', b'"rank":0'))
    told.add(save, clock.now)
    (report,) = told.reports
    assert report["kind"] == "abandoned"
    assert path.name in report["reason"]


def test_a_directory_that_is_gone_is_a_failure_and_a_closed_attempt_a_take_over(
    run: Run, clock: Clock
) -> None:
    save, told = run.save(0, 10, ranks=[0]), Told(run, clock)
    told.add(save, clock.now)
    os.rename(save.path, f"{save.path}.away")
    told.committer.serve()
    assert told.kinds() == ["abandoned"]
    save, told = run.save(0, 20, counter=2, ranks=[0]), Told(run, clock)
    told.add(save, clock.now)
    run.close(0)
    told.committer.serve()
    assert told.kinds() == ["fenced"]


def test_retention_that_fails_is_said_and_the_commit_stands(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(commit, "point_latest", fail)
    told = Told(run, clock)
    told.add(run.save(0, 10), clock.now)
    assert told.kinds() == ["committed", "untidy"]
    assert run.tags() == ["global_step10"]


def test_thousands_of_ranks_commit_with_names_polled_and_receipts_read_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_id = names.SaveId(0, 1, "global_step10", NONCE)
    name = names.save_directory(save_id.tag, 1)
    draft = make_draft(save_id, _MANY, 1 << 40, ((0, 0),), None).draft_json()
    path = run.directory.attempt(0).save(name)
    os.mkdir(path)
    receipts = _receipts(str(save_id), draft)
    last = receipts.popitem()
    _write(path, receipts)
    told = Told(run, time.monotonic, _MANY)
    opened: list[str] = []
    listed: list[str] = []
    _count(monkeypatch, opened, listed)
    told.committer.add(name, draft, time.monotonic())
    for _ in range(3):
        told.committer.serve()
    assert told.reports == []
    assert not [each for each in opened if each.endswith(".json")], "only names are looked at"
    assert len(listed) <= 2 * 4, "the save's, and the attempt's for those who have left"
    _write(path, dict([last]))
    del opened[:], listed[:]
    told.committer.serve()
    assert told.kinds() == ["committed"], told.reports
    tag = run.directory.tag("global_step10")
    manifest = Path(tag, MANIFEST)
    read = [each for each in opened if each.endswith(".json")]
    assert len(read) == len(set(read)), "each file once"
    assert set(read) == {
        *(os.path.join(path, names.receipt_name(rank, _MANY)) for rank in range(_MANY)),
        str(manifest),  # by retention
    }
    assert len(listed) < 20
    assert manifest.stat().st_size < 2_000_000
    assert len(json.loads(manifest.read_text())["shards"]) == _MANY


def _receipts(save_id: str, draft: dict[str, Any]) -> dict[int, bytes]:
    return {
        rank: Receipt(
            name=names.shard_name(rank, _MANY),
            size_bytes=8,
            data_offset=8,
            header_digest="0" * 32,
            digest="0" * 32,
            save_id=save_id,
            rank=rank,
            world_size=_MANY,
            seconds=0.0,
            draft=draft if rank == 0 else None,
        ).to_bytes()
        for rank in range(_MANY)
    }


def _write(path: str, receipts: dict[int, bytes]) -> None:
    """Put in receipts, and shards that are one file under many names."""
    shard = os.path.join(os.path.dirname(path), "trash", "shard")
    Path(shard).write_bytes(bytes(8))
    for rank, data in receipts.items():
        os.link(shard, os.path.join(path, names.shard_name(rank, _MANY)))
        Path(path, names.receipt_name(rank, _MANY)).write_bytes(data)


def _count(monkeypatch: pytest.MonkeyPatch, opened: list[str], listed: list[str]) -> None:
    real_listing, real_read = os.listdir, files.read_listed

    def counted_listing(directory: str) -> list[str]:
        listed.append(directory)
        return real_listing(directory)

    def counted_read(file: str) -> bytes | None:
        opened.append(file)
        return real_read(file)

    monkeypatch.setattr(os, "listdir", counted_listing)
    monkeypatch.setattr(files, "read_listed", counted_read)
