"""What a failure costs: that save, and no more. Real writers of two ranks, on real disks."""

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.checkpoint import old_writers
from engine.protocol import files
from engine.protocol.acquire import Lease
from tests.checkpoint.writers import WAIT_SECONDS, Rank, Ranks, failing
from tests.protocol.driver.content import read_whole
from tests.protocol.saves import Run
from tests.slurm.cluster_job import wait_for

_QUICK = Lease(0.5, 0.02)


def _pidfd(rank: Rank) -> int:
    assert rank.link.pid is not None
    return os.pidfd_open(rank.link.pid)


def _has_ended(pidfd: int, timeout_seconds: float = 0) -> bool:
    return bool(select.select([pidfd], [], [], timeout_seconds)[0])


def test_a_stopped_writer_is_noticed_by_its_silence_and_replaced(ranks: Ranks) -> None:
    rank_0, rank_1 = ranks.start(silence_seconds=2.0)
    pidfds = _pidfd(rank_0), _pidfd(rank_1)
    signal.pidfd_send_signal(pidfds[1], signal.SIGSTOP)
    ranks.save(1)
    assert _has_ended(pidfds[1]), "with it, its hold on the image has gone"
    assert not _has_ended(pidfds[0])
    (event,) = rank_1.told("writer_restarted")
    assert "said nothing" in event["reason"]
    assert len(event["saves"]) == 1
    assert [event["step"] for event in rank_0.told("committed")] == [1]
    read_whole(ranks.run.directory.tag("global_step1"))
    for pidfd in pidfds:
        os.close(pidfd)


def test_a_writer_that_works_for_longer_than_the_silence_is_left_alone(ranks: Ranks) -> None:
    _, rank_1 = ranks.start(silence_seconds=1.0, bytes_per_second=4096)
    pidfd = _pidfd(rank_1)
    ranks.save(1)
    (persisted,) = rank_1.told("persisted")
    assert persisted["seconds"] > 1.0
    assert rank_1.told("writer_restarted") == []
    assert not _has_ended(pidfd)
    os.close(pidfd)


def test_a_rank_that_is_too_slow_costs_that_save(ranks: Ranks) -> None:
    ranks.start(commit_deadline_seconds=0.3, bytes_per_second=2048)
    ranks.save(1)
    assert "ranks [1] gave no receipt in commit_deadline_seconds=0.3" in ranks.reasons(1)
    assert ranks.run.tags() == []


def test_a_writer_that_was_given_up_does_not_close_the_attempt_of_a_live_trainer(
    ranks: Ranks,
) -> None:
    rank_0, _ = ranks.start()
    pidfd = _pidfd(rank_0)
    rank_0.link._drop()  # as after a start that took too long
    assert _has_ended(pidfd, WAIT_SECONDS)
    os.close(pidfd)
    ranks.save(1)
    assert [event["step"] for event in rank_0.told("committed")] == [1]


def test_a_rank_whose_writer_has_left_is_not_waited_for(ranks: Ranks) -> None:
    rank_0, rank_1 = ranks.start()
    pidfd = _pidfd(rank_1)
    rank_1.link.close()
    assert _has_ended(pidfd, WAIT_SECONDS)
    os.close(pidfd)
    rank_0.save(1)
    assert rank_0.handover.settle(WAIT_SECONDS)
    assert "the writers of ranks [1] have left" in ranks.reasons(1)


def test_an_attempt_that_was_closed_meanwhile_is_known_without_a_save_being_due(
    ranks: Ranks,
) -> None:
    rank_0, _ = ranks.start(lease=_QUICK)
    ranks.run.close(0)
    rank_0.await_told("fenced")
    assert rank_0.handover.fenced
    (event,) = rank_0.told("fenced")
    assert event["reason"] == "another start has closed this attempt"
    assert rank_0.told("failed") == []


def test_beats_that_do_not_get_through_are_told_and_counted(ranks: Ranks) -> None:
    rank_0, _ = ranks.start(lease=_QUICK)
    path = ranks.run.directory.attempt(0).path
    for count in (1, 2):
        os.rename(path, f"{path}.away")
        rank_0.await_told("beat_lost", count)
        os.rename(f"{path}.away", path)
        rank_0.await_told("beat_restored", count)
    counts = [event["count"] for event in rank_0.told("beat_lost")]
    assert counts == list(range(1, len(counts) + 1)), "more than two where the machine is slow"
    assert not rank_0.handover.fenced
    ranks.save(1)
    assert [event["step"] for event in rank_0.told("committed")] == [1]


@pytest.mark.parametrize("function", ["pwrite", "fsync", "ftruncate"])
def test_an_error_of_the_disk_costs_that_save_and_counts_in_a_row_only(
    ranks: Ranks, tmp_path: Path, function: str
) -> None:
    fired = tmp_path / "fired"
    _, rank_1 = ranks.start(command=failing(function, "EIO", fired))
    ranks.save(1)
    assert fired.exists()
    assert "Input/output error" in ranks.reasons(1)
    assert "ranks [1] could not write their shard" in ranks.reasons(1)
    assert [rank.handover.failures_in_a_row for rank in ranks.all] == [1, 1]
    assert files.listing(ranks.run.directory.attempt(0).open) == ["trash"]
    ranks.save(2)
    assert ranks.run.tags() == ["global_step2"]
    assert [rank.handover.failures_in_a_row for rank in ranks.all] == [0, 0]
    assert rank_1.told("writer_restarted") == []


@pytest.fixture
def freezable(tmp_path: Path) -> Iterator[Path]:
    """A disk that `fsfreeze` makes hang: whoever writes to it rests in the kernel, in D state."""
    disk, image = tmp_path / "disk", tmp_path / "disk.img"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    yield disk
    subprocess.run(["fsfreeze", "--unfreeze", disk], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a loop device takes root")
def test_a_writer_that_a_dead_disk_holds_gives_its_image_back_and_writes_nothing_more(
    freezable: Path,
) -> None:
    """It cannot be killed, and its attempt has a successor; only its memory can be taken away."""
    run = Run(freezable)
    directory = run.directory
    ranks = Ranks(run, Path(directory.attempt(0).path))  # logs there: so it is found
    try:
        _, rank_1 = ranks.start()
        pidfd, pid = _pidfd(rank_1), rank_1.link.pid
        subprocess.run(["fsfreeze", "--freeze", freezable], check=True)
        rank_1.save(1)
        wait_for(lambda: _state(pid) == "D", WAIT_SECONDS, "it is stuck")
        image = rank_1.images[1]
        assert os.fstat(image).st_blocks > 0
        assert pid in old_writers.reclaim(directory, attempt=1)
        assert not _has_ended(pidfd), "nobody can end it"
        assert (os.fstat(image).st_size, os.fstat(image).st_blocks) == (0, 0)
        subprocess.run(["fsfreeze", "--unfreeze", freezable], check=True)
        assert _has_ended(pidfd, WAIT_SECONDS)
        os.close(pidfd)
    finally:
        ranks.end()
    save = Path(directory.attempt(0).save("global_step1.s0001"))
    assert not save.exists() or list(save.iterdir()) == []


def _state(pid: int | None) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
