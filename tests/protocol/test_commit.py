"""The commit: one rename, and everything that may stand in its way."""

import os
from pathlib import Path

import pytest

from engine.format import names
from engine.format.errors import FormatError
from engine.protocol import commit, files
from engine.protocol.commit import Published
from engine.protocol.layout import MANIFEST
from tests.protocol.driver.content import read_whole
from tests.protocol.saves import WORLD_SIZE, Run


@pytest.fixture
def started(run: Run) -> Run:
    """A run whose attempts 0, 1 and 2 are open: who may commit is told by the test."""
    for number in range(3):
        run.attempt(number)
    return run


def test_a_whole_save_becomes_its_tag(started: Run) -> None:
    save = started.save(0, 10)
    assert save.publish(0) is Published.DONE
    assert started.tags() == ["global_step10"]
    assert not os.path.exists(save.path)
    tag = started.directory.tag("global_step10")
    assert read_whole(tag).save_id == save.save_id
    wanted = {MANIFEST}
    for rank in range(WORLD_SIZE):
        wanted |= {names.shard_name(rank, WORLD_SIZE), names.receipt_name(rank, WORLD_SIZE)}
    assert set(os.listdir(tag)) == wanted


def test_what_a_killed_writer_was_in_the_middle_of_does_not_come_along(started: Run) -> None:
    save = started.save(0, 10)
    for name in (".part.1.dead", ".poke.1.dead"):
        Path(save.path, name).touch()
    assert save.publish(0) is Published.DONE
    listed = os.listdir(started.directory.tag("global_step10"))
    assert not [name for name in listed if name.startswith(".")]


def test_missing_receipts_are_named(started: Run) -> None:
    save = started.save(0, 10, ranks=[1])
    listed = files.fresh_listing(save.path)
    assert commit.missing_receipts(listed, WORLD_SIZE) == [0]
    assert commit.missing_receipts([], WORLD_SIZE) == [0, 1]
    save.write(0)
    assert commit.missing_receipts(files.fresh_listing(save.path), WORLD_SIZE) == []


def test_a_receipt_of_another_save_is_refused(started: Run) -> None:
    save, other = started.save(0, 10, ranks=[0]), started.save(0, 11, counter=2)
    name = names.receipt_name(1, WORLD_SIZE)
    shard = names.shard_name(1, WORLD_SIZE)
    for file in (name, shard):
        Path(save.path, file).write_bytes(Path(other.path, file).read_bytes())
    with pytest.raises(FormatError, match=f"{other.save_id}, wanted {save.save_id}"):
        commit.read_receipts(save.path, WORLD_SIZE, save.save_id)


def test_a_shard_whose_size_is_not_its_receipts_is_refused(started: Run) -> None:
    save = started.save(0, 10)
    shard = Path(save.path, names.shard_name(1, WORLD_SIZE))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FormatError, match="bytes, the receipt says"):
        commit.read_receipts(save.path, WORLD_SIZE, save.save_id)


@pytest.mark.parametrize("missing", ["receipt", "shard", "directory"])
def test_a_save_that_goes_while_it_is_read_has_no_receipts(started: Run, missing: str) -> None:
    save = started.save(0, 10)
    if missing == "receipt":
        os.unlink(Path(save.path, names.receipt_name(1, WORLD_SIZE)))
    elif missing == "shard":
        os.unlink(Path(save.path, names.shard_name(1, WORLD_SIZE)))
    else:
        os.rename(save.path, f"{save.path}.gone")
    assert commit.read_receipts(save.path, WORLD_SIZE, save.save_id) is None


def test_a_fenced_attempt_touches_nothing(started: Run) -> None:
    save = started.save(0, 10)
    assert not commit.is_fenced(started.directory, 1)
    started.close(1)
    assert commit.is_fenced(started.directory, 1)
    assert save.publish(by_attempt=1, may_replace=True) is Published.FENCED
    assert started.tags() == []
    assert os.path.exists(save.path)


def test_a_save_that_a_newer_attempt_has_swept_is_gone(started: Run) -> None:
    save = started.save(0, 10)
    real = commit.is_fenced

    def sweep_first(*arguments: object) -> bool:
        os.rename(save.path, os.path.join(started.directory.attempt(1).trash, "swept"))
        return False

    commit.is_fenced = sweep_first  # type: ignore[assignment]
    try:
        assert save.publish(0) is Published.GONE
    finally:
        commit.is_fenced = real
    assert started.tags() == []


def test_a_save_that_a_newer_attempt_has_committed_is_committed(
    started: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look and the rename: the loser of that race finds its own id."""
    save = started.save(0, 10)

    def adopt_first(*arguments: object) -> bool:
        os.rename(save.path, started.directory.tag("global_step10"))
        return False

    monkeypatch.setattr(commit, "is_fenced", adopt_first)
    assert save.publish(0) is Published.ALREADY
    assert started.holder(10) == save.save_id


def test_a_second_copy_of_a_committed_save_is_not_committed_again(started: Run) -> None:
    first = started.commit(0, 10)
    again = started.save(0, 10)
    assert again.publish(0) is Published.ALREADY
    assert started.holder(10) == first.save_id
    assert commit.is_committed(started.directory, first.save_id)


def test_is_committed_tells_saves_of_one_tag_apart(started: Run) -> None:
    first = started.commit(0, 10)
    other = started.save(1, 10)
    assert commit.is_committed(started.directory, first.save_id)
    assert not commit.is_committed(started.directory, other.save_id)
    assert not commit.is_committed(started.directory, started.save(0, 11, counter=2).save_id)


def test_a_tag_that_may_not_be_replaced_stays(started: Run) -> None:
    """A higher attempt's, or one on the own line: whoever asks is in the wrong."""
    holder = started.commit(1, 10)
    save = started.save(0, 10)
    assert save.publish(0, may_replace=False) is Published.TAKEN
    assert started.holder(10) == holder.save_id
    assert os.path.exists(save.path)
    assert started.strays() == []


def test_a_tag_that_may_be_replaced_is_set_aside_whole(started: Run) -> None:
    holder = started.commit(0, 10)
    save = started.save(1, 10)
    assert save.publish(1, may_replace=True) is Published.DONE
    assert started.holder(10) == save.save_id
    assert started.strays() == [f"global_step10.{holder.save_id}"]
    stray = os.path.join(started.directory.strays, started.strays()[0])
    assert read_whole(stray).save_id == holder.save_id


def test_a_tag_without_a_manifest_is_not_replaced(started: Run) -> None:
    os.makedirs(os.path.join(started.directory.tag("global_step10"), "mine"))
    save = started.save(0, 10)
    assert save.publish(0, may_replace=True) is Published.TAKEN
    assert os.listdir(started.directory.tag("global_step10")) == ["mine"]


def test_latest_names_the_tag_for_people(started: Run) -> None:
    commit.point_latest(started.directory, "global_step10")
    commit.point_latest(started.directory, "global_step20")
    assert Path(started.directory.latest).read_text() == "global_step20\n"
