"""The local tier with real writers of two ranks, each with its own disk; then with DeepSpeed."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.handover import BACKLOG
from engine.checkpoint.writer_link import Seal
from engine.format import names
from engine.format.digest import digest_bytes
from engine.format.manifest import Manifest
from engine.protocol import adoption, files, takeover
from engine.protocol.local import LocalDisk
from engine.resume.choose import AUTO, choose
from tests.checkpoint.writers import WAIT_SECONDS, Rank
from tests.distributed.ranks import run_ranks
from tests.faults import points
from tests.faults.points import Fault
from tests.protocol.driver.content import read_whole
from tests.protocol.saves import NONCE, WORLD_SIZE, Run
from tests.slurm.cluster_job import wait_for

_SLOW, _STANDSTILL = 8192, 200  # bytes per second; a shard has more than one block of 4096
_CASES = "tests.checkpoint.local_cases"


class Nodes:
    """Attempt 0 of two ranks, on two nodes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.run = Run(root)
        self.run.attempt(0)
        self.disks = [LocalDisk(str(root / f"node-{r}" / "run"), r, WORLD_SIZE) for r in range(2)]
        for disk in self.disks:
            os.makedirs(disk.root)
        self.all: list[Rank] = []

    def start(
        self,
        fault: Fault | None = None,
        bytes_per_second: float | None = None,
        rates: Sequence[float | None] = (),
    ) -> list[Rank]:
        """Start the writers, one of them armed with `fault`, at one rate or at one for each."""
        rates = rates or [bytes_per_second] * WORLD_SIZE
        for disk in self.disks:
            command = None if fault is None else points.writer_command(fault, disk.rank)
            self.all.append(
                Rank(
                    disk.rank,
                    self.run,
                    self._root,
                    command=command,
                    local_run=disk.root,
                    bytes_per_second=rates[disk.rank],
                )
            )
        return self.all

    def settle(self) -> None:
        for rank in reversed(self.all):
            assert rank.handover.settle(WAIT_SECONDS)

    def await_tidy(self) -> None:
        """Rank 0's writer tidies up after it has told of a commit."""
        directory = self.run.directory
        left = (directory.local_saves, directory.attempt(0).open)
        wait_for(
            lambda: [files.listing(path) for path in left] == [[], ["trash"]],
            WAIT_SECONDS,
            "nothing is left in the local tier and in the attempt",
        )

    def kill_writers(self) -> None:
        for rank in self.all:
            rank.link.kill()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.kill_writers()


def _save_id(step: int) -> str:
    return str(names.SaveId(0, step, names.tag_of(step), NONCE))


def _steps(disk: LocalDisk) -> list[int]:
    return [save.save_counter for save in disk.saves()]


def test_a_save_is_committed_in_the_local_tier_first_and_then_in_the_shared_directory(
    nodes: Nodes,
) -> None:
    ranks = nodes.start(bytes_per_second=_SLOW)
    for step in (1, 2):
        for rank in ranks:
            rank.save(step)
        nodes.settle()
        read_whole(nodes.run.directory.tag(names.tag_of(step)))
    kinds = [event["event"] for event in ranks[0].events if event.get("step") == 2]
    assert kinds == ["persisted_locally", "committed_locally", "persisted", "committed"]
    nodes.await_tidy()
    assert [_steps(disk) for disk in nodes.disks] == [[2], [2]], "of each rank the newest stays"
    assert sorted(os.listdir(nodes.disks[0].root)) == [_save_id(2)]


def test_what_follows_comes_from_the_nodes_disk_and_the_image_is_free(nodes: Nodes) -> None:
    _, rank_1 = nodes.start(bytes_per_second=_SLOW)
    for rank in nodes.all:
        rank.save(1)
    rank_1.await_told("persisted_locally")
    assert rank_1.handover.held_images == set()
    os.pwrite(rank_1.images[1], bytes(8192), 0)  # as the next save does
    assert rank_1.link.pid is not None
    os.kill(rank_1.link.pid, signal.SIGKILL)  # also a new writer finds what is to follow
    nodes.settle()
    assert len(rank_1.told("writer_restarted")) == 1
    read_whole(nodes.run.directory.tag("global_step1"))


def test_writers_send_on_what_is_local_before_they_sign_off(nodes: Nodes) -> None:
    """Rank 0's has long done its part: it would abandon the save of one that leaves early."""
    ranks = nodes.start(rates=(None, _SLOW / 4))
    for rank in ranks:
        rank.save(1)
    for rank in ranks:
        rank.await_told("persisted_locally")
        rank.link.close()
    attempt = nodes.run.directory.attempt(0)
    wait_for(lambda: os.path.exists(attempt.closed), WAIT_SECONDS, "rank 0's has signed off")
    read_whole(nodes.run.directory.tag("global_step1"))


# (moment, the occurrence of it, rank of the writer) -> where the next attempt finds the save
_LOCAL, _SHARED = "local", "shared"
_MOMENTS = {
    ("before fsync", 1, 1): None,
    ("before the receipt", 1, 1): None,
    ("before the receipt", 1, 0): None,
    ("before the manifest", 1, 0): _LOCAL,
    ("mid-write", 1, 1): _LOCAL,
    ("before fsync", 2, 0): _LOCAL,
    ("before the receipt", 2, 1): _LOCAL,
    ("before the manifest", 2, 0): _SHARED,
    ("before the commit's rename", 1, 0): _SHARED,
}


def _fault(root: Path, moment: str, occurrence: int, rank: int, number: int) -> Fault:
    return Fault(
        points.WRITER, rank, moment, occurrence, str(root / "fired"), signal.Signals(number)
    )


@pytest.mark.parametrize(("moment", "occurrence", "rank"), _MOMENTS)
def test_a_writer_that_is_killed_at_any_moment_is_replaced(
    nodes: Nodes, tmp_path: Path, moment: str, occurrence: int, rank: int
) -> None:
    fault = _fault(tmp_path, moment, occurrence, rank, signal.SIGKILL)
    nodes.start(fault, bytes_per_second=_SLOW)
    for one in nodes.all:
        one.save(1)
    nodes.settle()
    assert Path(fault.record).exists()
    assert len(nodes.all[rank].told("writer_restarted")) == 1
    read_whole(nodes.run.directory.tag("global_step1"))
    nodes.all[0].save(2)
    nodes.all[1].save(2)
    nodes.settle()
    nodes.await_tidy()


@pytest.mark.parametrize(("moment", "occurrence", "rank"), _MOMENTS)
def test_what_the_next_attempt_finds_when_everything_dies_at_any_moment(
    nodes: Nodes, tmp_path: Path, moment: str, occurrence: int, rank: int
) -> None:
    fault = _fault(tmp_path, moment, occurrence, rank, signal.SIGSTOP)
    nodes.start(fault, bytes_per_second=_SLOW)
    for one in nodes.all:
        one.save(1)
    other = nodes.all[1 - rank]
    other.await_told("persisted_locally")
    if (moment, occurrence) == ("mid-write", 1) or occurrence == 2:
        other.await_told("persisted")
    wait_for(lambda: Path(fault.record).exists(), WAIT_SECONDS, "the fault has fired")
    nodes.kill_writers()
    directory = nodes.run.directory
    nodes.run.close(0)
    nodes.run.attempt(1)
    adoption.adopt(directory, 1)
    found = choose(directory, 1, AUTO, WORLD_SIZE).candidates
    where = {True: _LOCAL, False: _SHARED}
    wanted = _MOMENTS[moment, occurrence, rank]
    assert [where[one.is_local] for one in found] == ([wanted] if wanted else [])
    if wanted == _LOCAL:
        _hold_it(nodes.disks, found[0].manifest)
    if wanted == _SHARED:
        read_whole(directory.tag("global_step1"))
    takeover.begin(directory, 1, found[0].manifest if found else None)
    left = files.listing(directory.local_saves)
    assert left == ([f"global_step1.{_save_id(1)}"] if wanted == _LOCAL else [])


def _hold_it(disks: list[LocalDisk], manifest: Manifest) -> None:
    for disk, record in zip(disks, manifest.shards, strict=True):
        assert digest_bytes(Path(disk.file(manifest.save_id)).read_bytes()) == record.digest


def test_a_full_disk_of_a_node_costs_its_speed_and_not_the_save(
    nodes: Nodes, small_disk: Path | None
) -> None:
    if small_disk is None:
        pytest.skip("mounting a tmpfs takes root")
    nodes.disks[1] = LocalDisk(str(small_disk / "run"), 1, WORLD_SIZE)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    _, rank_1 = nodes.start()
    for step in (1, 2):
        for rank in nodes.all:
            rank.save(step)
        nodes.settle()
    filler.unlink(missing_ok=True)
    for rank in nodes.all:
        rank.save(3)
    nodes.settle()
    failures = [(event["step"], event["count"]) for event in rank_1.told("local_failed")]
    assert failures == [(1, 1), (2, 2)]
    assert "No space left" in rank_1.told("local_failed")[0]["reason"]
    assert [event["step"] for event in rank_1.told("persisted_locally")] == [3]
    assert [event["step"] for event in nodes.all[0].told("committed_locally")] == [3]
    for step in (1, 2, 3):
        read_whole(nodes.run.directory.tag(names.tag_of(step)))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "has gone"),
        (lambda path: path.write_bytes(path.read_bytes()[:4096]), "ends at byte 4096"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
            "its content has changed since it was written",
        ),
    ],
)
def test_a_local_file_that_is_not_what_it_was_costs_its_save_and_says_so(
    nodes: Nodes, damage: Any, reason: str
) -> None:
    """By way of a save that an earlier attempt has left: the next attempt sends it on."""
    ranks = nodes.start()
    save = nodes.run.save(0, 7, counter=7, ranks=[])
    receipts = [save.write_locally(disk) for disk in nodes.disks]
    damage(Path(nodes.disks[1].file(save.save_id)))
    for rank, receipt in zip(ranks, receipts, strict=True):
        seal = Seal(
            save=names.save_directory("global_step7", 0),
            save_id=save.save_id,
            size_bytes=receipt.size_bytes,
            data_offset=receipt.data_offset,
            draft=json.dumps(receipt.draft).encode() if rank.number == 0 else None,
            digest=receipt.digest,
        )
        rank.handover.hand_over_local(seal)
    nodes.settle()
    (failed,) = ranks[1].told("failed")
    assert reason in failed["reason"]
    assert "ranks [1] could not write their shard" in ranks[0].told("abandoned")[0]["reason"]
    assert nodes.run.tags() == []
    for rank in ranks:
        rank.save(8)
    nodes.settle()
    assert nodes.run.tags() == ["global_step8"]


def test_only_so_many_saves_wait_for_a_slow_shared_directory(nodes: Nodes) -> None:
    rank_0, _ = nodes.start(bytes_per_second=_STANDSTILL)
    for step in range(1, BACKLOG + 2):
        assert rank_0.handover.busy == ""
        rank_0.save(step)
        rank_0.await_told("persisted_locally", count=step)
    assert rank_0.handover.held_images == set()
    assert _steps(nodes.disks[0]) == list(range(1, BACKLOG + 2)), "none of them is elsewhere yet"
    assert rank_0.handover.busy.startswith(f"{BACKLOG + 1} saves are still on their way")


@pytest.fixture(scope="module")
def ranks_of_two_lives(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What DeepSpeed ranks return that come after others, who died with a save on two disks."""
    root = tmp_path_factory.mktemp("deepspeed")
    run_ranks(f"{_CASES}:first_life", 2, exit_code=-signal.SIGKILL, root=str(root))
    results: list[dict[str, Any]] = run_ranks(f"{_CASES}:second_life", 2, root=str(root))
    return results


def test_a_run_continues_bit_for_bit_from_the_nodes_disks_alone(
    ranks_of_two_lives: list[dict[str, Any]],
) -> None:
    for result in ranks_of_two_lives:
        record = result["from_disks"]
        assert record["step"] == 4
        assert record["records"] == result["whole"][4:]
        assert record["from_local"] == [True]
    assert ranks_of_two_lives[0]["from_disks"]["committed"] == [4, 6]
    assert ranks_of_two_lives[0]["from_disks"]["left"] == []


def test_with_a_lost_disk_it_continues_from_the_newest_shared_one(
    ranks_of_two_lives: list[dict[str, Any]],
) -> None:
    for result in ranks_of_two_lives:
        record = result["one_disk_lost"]
        assert record["step"] == 2
        assert record["records"] == result["whole"][2:4]
        assert "rank 1: " in record["incomplete"]
        assert "there is no such file" in record["incomplete"]
        assert "rank 0" not in record["incomplete"]


def test_without_its_local_dir_a_run_says_what_it_leaves_behind(
    ranks_of_two_lives: list[dict[str, Any]],
) -> None:
    rank_0, _ = ranks_of_two_lives
    assert rank_0["without"]["step"] == 2
    assert "set checkpoint.local_dir to where it was then" in rank_0["without"]["passed_over"]
    assert "only in the local tier, and not all ranks have" in rank_0["one_disk_lost"]["named"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a file", "does not serve on this node"),
        ("inside", "or in it"),
    ],
)
def test_a_local_dir_that_does_not_serve_is_refused_on_all_ranks(
    ranks_of_two_lives: list[dict[str, Any]], kind: str, message: str
) -> None:
    for result in ranks_of_two_lives:
        assert message in result["refused"][kind]
        assert result["refused"][kind].startswith("rank 0: checkpoint.local_dir=")
