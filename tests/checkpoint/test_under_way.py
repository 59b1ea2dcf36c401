"""How far a save is, as the trainer of real writers is told; and a count that is never wrong."""

import os
from pathlib import Path

from engine.checkpoint.persist import RateLimit, persist
from engine.checkpoint.under_way import Tally, UnderWay
from engine.protocol import local
from engine.protocol.layout import CheckpointDirectory
from tests.checkpoint.writers import Ranks
from tests.protocol.driver.content import plan_of
from tests.protocol.saves import NONCE, WORLD_SIZE

_PAGE = 4096
_NUMEL = 10_000
_STUCK = 1.0
"""Bytes per second: each of the two writes under way is one page, and then waits for an hour."""


def _save_id(step: int) -> str:
    return f"a0000.s{step:04d}.global_step{step}.{NONCE}"


def test_the_receipts_that_rank_0_waits_for(ranks: Ranks) -> None:
    """Rank 1 has not staged yet what rank 0 has on disk."""
    rank_0, rank_1 = ranks.start()
    rank_0.save(1)
    assert rank_0.await_progress(1) == UnderWay("commit", _save_id(1), 1, WORLD_SIZE)
    rank_1.save(1)
    for rank in (rank_1, rank_0):
        assert rank.handover.settle(60.0)
    told = len(rank_0.progress)
    rank_0.handover.take_in()
    assert len(rank_0.progress) == told, "a settled save is not under way"


def test_the_bytes_of_a_slow_disk(ranks: Ranks) -> None:
    _, rank_1 = ranks.start(bytes_per_second=_STUCK)
    size = plan_of(_NUMEL, WORLD_SIZE, 1).size_bytes
    assert size > 2 * _PAGE
    rank_1.save(1, _NUMEL)
    assert rank_1.await_progress(2 * _PAGE) == UnderWay("save", _save_id(1), 2 * _PAGE, size)


def test_what_drains_from_the_local_tier(ranks: Ranks, tmp_path: Path) -> None:
    directory = CheckpointDirectory(ranks.run.directory.root)
    folder = local.make_folder(str(tmp_path / "nvme"), local.run_of(directory), directory)
    _, rank_1 = ranks.start(bytes_per_second=_STUCK, local_run=folder)
    rank_1.save(1, _NUMEL)
    assert rank_1.await_progress(2 * _PAGE).kind == "save"
    assert [event["step"] for event in rank_1.told("persisted_locally")] == [1]


def test_a_count_is_of_the_shard_and_not_of_whole_blocks(tmp_path: Path) -> None:
    size = 3 * _PAGE + 1
    image = os.memfd_create("image", os.MFD_CLOEXEC)
    os.ftruncate(image, 4 * _PAGE)
    tally, seen = Tally(), []
    with tally.writing("save_locally", "s", size) as count:

        def look(written: int) -> None:
            count(written)
            seen.append(tally.as_json()[0]["done"])

        # A byte a second would be waited for; a rate that is never reached only sets the chunks.
        limit = RateLimit(_PAGE * 10, look, sleep=lambda seconds: None)
        persist(image, size, _PAGE, str(tmp_path / "shard"), limit)
        assert tally.as_json() == [
            {"kind": "save_locally", "save_id": "s", "done": size, "total": size}
        ]
    os.close(image)
    assert seen[-1] == size
    assert seen == sorted(seen)
    assert len(seen) == 4
    assert tally.as_json() == []


def test_a_save_that_ended_is_forgotten() -> None:
    tally = Tally()
    tally.waiting("s", 2, 3)
    assert tally.as_json() == [{"kind": "commit", "save_id": "s", "done": 2, "total": 3}]
    tally.settled("s")
    tally.settled("s")
    assert tally.as_json() == []
