"""What users have reported of saving elsewhere, each as a test: it cannot happen here.

The numbers are those of a list of such reports; resuming has the others.
"""

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.protocol.acquire import Lease, RunHeldError, acquire
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.owner import Owner, Place
from tests.checkpoint.conftest import Results
from tests.checkpoint.memory_cgroup import memory_cgroup
from tests.checkpoint.writers import WAIT_SECONDS, Ranks, failing
from tests.protocol.driver.content import read_whole
from tests.protocol.saves import Run

_REPOSITORY = Path(__file__).parents[2]


def test_2_latest_names_no_checkpoint_that_other_ranks_have_not_finished(ranks: Ranks) -> None:
    """Seen in DeepSpeed 0.19.8: rank 0 writes `latest` when it is done itself."""
    rank_0, rank_1 = ranks.start()
    latest = Path(ranks.run.directory.latest)
    for step in (1, 2, 3):
        rank_0.save(step)
        rank_0.await_told("persisted", step=step)  # rank 0's part of this save is done
        done = [f"global_step{number}" for number in range(1, step)]
        assert ranks.run.tags() == done
        assert (latest.read_text().split() if latest.exists() else []) == done[-1:]
        for tag in done[-1:]:
            read_whole(ranks.run.directory.tag(tag))
        rank_1.save(step)
        assert rank_0.handover.settle(WAIT_SECONDS)


def test_4_a_writer_that_dies_is_noticed_and_its_save_and_the_next_one_commit(
    results: Results, root: Path
) -> None:
    """DeepSpeed#7741: the writer of a checkpoint is killed, and the training hangs for ever."""
    for result in results:
        assert result["writer_dies"] == {
            "committed": True,
            "restarted": 1,
            "replaced": True,
            "tags": ["global_step1", "global_step2"],
        }
    _is_intact(root / "writer_dies")


def test_4_a_writer_that_the_kernel_kills_for_memory(ranks: Ranks) -> None:
    """DeepSpeed#7741, in its usual way: a memory cgroup that has run full."""
    with memory_cgroup(limit_bytes=4096) as cgroup:
        if cgroup is None:
            pytest.skip("this machine lets nobody make a memory cgroup")
        _, rank_1 = ranks.start()
        ranks.save(1)
        assert rank_1.link.pid is not None
        pidfd = os.pidfd_open(rank_1.link.pid)
        cgroup.take_in(rank_1.link.pid)
        ranks.save(2)
        assert select.select([pidfd], [], [], 0)[0], "it was killed"
        os.close(pidfd)
    (event,) = rank_1.told("writer_restarted")
    assert (event["reason"], len(event["saves"])) == ("it has died", 1)
    ranks.save(3)
    assert ranks.run.tags() == ["global_step1", "global_step2", "global_step3"]


def test_5_the_last_save_before_the_end_is_awaited_and_committed(results: Results) -> None:
    """awslabs/hybrid-model-factory#4: the process ended, and with it the save under way."""
    for result in results:
        before, committed, after = result["staged_bytes_do_not_alias"]["awaited"]
        assert (before, committed, after) == (False, True, True)


def test_6_state_of_every_kind_that_changes_after_save_is_not_in_the_checkpoint(
    staging_results: Results, staging_root: Path
) -> None:
    """pytorch#144657, Lightning#20953: the file held values of a later step."""
    for result in staging_results:
        record = result["every_kind"]
        assert record["unchanged"] == [], "what does not change proves nothing"
        assert record["equal_anyway"] == [], "the target must differ before it is restored"
        assert record["wrong"] == []
        assert len(record["kinds"]) == 17
        assert record["scales"] == [256, 256, 128, 128], "the step before the last overflows"
        assert record["client"] == [[1], {"k": [2]}, {"positions": [3]}]
    _is_intact(staging_root / "every_kind")


def test_13_a_full_disk_costs_that_save_only_and_stops_the_run_when_it_stays(
    results: Results, small_disk: Path | None
) -> None:
    """ChatGLM-6B#1166: the disk filled during a save, and what was left could not be loaded."""
    if small_disk is None:
        pytest.skip("mounting a tmpfs takes root")
    cases = [result["disk_full"] for result in results]
    for case in cases:
        assert case["left"] == ["trash"]
        assert case["tags"] == ["global_step1", "global_step3"]
        assert "2 saves in a row have failed" in case["error"]
        assert "No space left on device" in case["error"]
    assert any("No space left" in reason for case in cases for reason in case["reasons"])
    _is_intact(small_disk / "disk_full")


def test_13_a_disk_that_is_full_for_one_rank_alone(ranks: Ranks, tmp_path: Path) -> None:
    """A Lustre target fills by itself, while the file system as a whole shows space."""
    rank_0, rank_1 = ranks.start(command=failing("pwrite", "ENOSPC", tmp_path / "fired"))
    ranks.save(1)
    assert (tmp_path / "fired").exists()
    assert "No space left on device" in ranks.reasons(1)
    assert [len(rank.told("failed") + rank.told("abandoned")) for rank in (rank_0, rank_1)] == [
        1,
        1,
    ]
    assert os.listdir(ranks.run.directory.attempt(0).open) == ["trash"]
    assert os.listdir(ranks.run.directory.attempt(0).trash) == []
    ranks.save(2)
    assert ranks.run.tags() == ["global_step2"]


def test_14_old_checkpoints_go_by_one_hand_and_never_the_newest_good_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Lightning#11687, transformers#20988: never deleted, or by several ranks at once."""
    command = failing("fsync", "EIO", tmp_path / "fired")
    rank_0, rank_1 = ranks.start(keep_last=1, command=command)
    ranks.save(1)
    assert "Input/output error" in ranks.reasons(1)
    for step in (2, 3, 4):
        ranks.save(step)
        if step > 2:
            rank_0.await_told("pruned", step=step)
        assert ranks.run.tags() == [f"global_step{step}"]
    assert [event["tags"] for event in rank_0.told("pruned")] == [
        ["global_step2"],
        ["global_step3"],
    ]
    assert rank_1.told("pruned") == []
    rank_0.save(5)
    rank_1.link.close()  # its writer leaves: step 5 comes to nothing
    assert rank_0.handover.settle(WAIT_SECONDS)
    assert rank_0.told("abandoned")[-1]["step"] == 5
    assert ranks.run.tags() == ["global_step4"], "the newest that is whole stays"


def test_16_a_save_before_the_first_step_resumes(results: Results) -> None:
    """The optimizer has no state yet; it is saved as it is, and makes the same state after."""
    for result in results:
        record = result["saves_before_the_first_step"]
        assert record["parts"] == record["whole"]


_HOLDER = """
import sys
from engine.protocol.acquire import Lease, acquire
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.owner import Owner
print(acquire(CheckpointDirectory(sys.argv[1]), Owner.this_process(1, {}), Lease()).attempt)
sys.stdout.flush()
sys.stdin.read()
"""


def test_18_of_two_runs_in_one_directory_the_second_is_refused_until_the_first_is_gone(
    tmp_path: Path,
) -> None:
    """By name of host and process; and a lock that its owner left by dying is none."""
    directory = CheckpointDirectory(str(tmp_path))
    me = Owner.this_process(1, {})
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, tmp_path],
        cwd=_REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "0\n"
        with pytest.raises(RunHeldError) as raised:
            acquire(directory, me, Lease())
        for part in ("attempt 0", Place.here().host, f"process {first.pid} is running", "run.name"):
            assert part in str(raised.value)
        first.kill()
    assert acquire(directory, me, Lease()).attempt == 1


def test_19_a_directory_that_vanishes_under_a_live_run_is_a_failed_disk(ranks: Ranks) -> None:
    """Nobody has taken the run over, and the writers live on to say so."""
    ranks.start()
    ranks.save(1)
    while os.path.exists(ranks.run.directory.root):  # rank 0's writer may still put things in
        shutil.rmtree(ranks.run.directory.root, ignore_errors=True)
    for step in (2, 3):
        ranks.save(step)
        assert f"was {ranks.run.directory.root} removed" in ranks.reasons(step)
    for rank in ranks.all:
        assert not rank.handover.fenced
        assert rank.handover.failures_in_a_row == 2
        assert rank.told("writer_restarted") == []
    assert not os.path.exists(ranks.run.directory.root)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a tmpfs takes root")
def test_19_a_directory_that_becomes_read_only_costs_the_saves_meanwhile(tmp_path: Path) -> None:
    """As a full disk: nothing half-written is left, and it goes on when it can."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
    ranks = Ranks(Run(disk), tmp_path)
    try:
        ranks.start()
        ranks.save(1)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        ranks.save(2)
        assert "Read-only file system" in ranks.reasons(2)
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        ranks.save(3)
        assert ranks.run.tags() == ["global_step1", "global_step3"]
        read_whole(ranks.run.directory.tag("global_step3"))
        for rank in ranks.all:
            assert rank.told("writer_restarted") == []
    finally:
        ranks.end()
        subprocess.run(["umount", "--lazy", disk], check=True)


def _is_intact(directory: Path) -> None:
    subprocess.run([sys.executable, "-m", "engine", "verify", str(directory), "--all"], check=True)
