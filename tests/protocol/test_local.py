"""The local tier's part of the protocol: what counts, what is dropped, what a new attempt finds."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from engine.format import names
from engine.protocol import adoption, files, local, takeover
from engine.protocol.acquire import UnsuitableDirectoryError
from engine.protocol.commit import Published
from engine.protocol.local import LocalDisk
from engine.protocol.owner import Owner
from engine.resume.choose import AUTO, MUST, Choice, choose
from engine.resume.errors import NothingToResumeError
from tests.protocol.saves import ELSEWHERE, NONCE, WORLD_SIZE, Run, Save


@pytest.fixture
def disks(tmp_path: Path) -> list[LocalDisk]:
    return [LocalDisk(str(tmp_path / "disk"), rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]


def _kept(run: Run, disks: list[LocalDisk], attempt: int, step: int, counter: int = 1) -> Save:
    """Make a save that all ranks have on their disks, and nothing of in the shared directory."""
    save = run.save(attempt, step, counter, ranks=[])
    for disk in disks:
        save.write_locally(disk)
    return save


def _published(run: Run) -> list[str]:
    return files.listing(run.directory.local_saves)


def _outcomes(run: Run, me: int) -> dict[str, str]:
    return {save.save: save.outcome for save in adoption.adopt(run.directory, me)}


# --- the commit in the local tier


def test_a_commit_is_one_rename_and_comes_once(run: Run, disks: list[LocalDisk]) -> None:
    run.attempt(0)
    save = _kept(run, disks, 0, 10)
    assert not local.is_published(run.directory, save.save_id)
    assert save.publish_locally(0) is Published.DONE
    assert _published(run) == [f"global_step10.{save.save_id}"]
    assert local.is_published(run.directory, save.save_id)
    receipts = [save.write_locally(disk) for disk in disks]  # a writer that does not know yet
    draft = save.draft.draft_json()
    again = local.publish(run.directory, f"{save.path}.local", draft, receipts, 0)
    assert again is Published.ALREADY


def test_an_attempt_that_is_over_commits_and_drops_nothing(
    run: Run, disks: list[LocalDisk]
) -> None:
    run.attempt(0)
    there = _kept(run, disks, 0, 10)
    assert there.publish_locally(0) is Published.DONE
    late = _kept(run, disks, 0, 20, counter=2)
    receipts = [late.write_locally(disk) for disk in disks]
    run.close(0)
    collected = os.path.join(run.directory.attempt(0).closed, "global_step20.s0002.local")
    draft = late.draft.draft_json()
    assert local.publish(run.directory, collected, draft, receipts, 0) is Published.FENCED
    assert not local.drop(run.directory, 0, _published(run)[0])
    assert _published(run) == [f"global_step10.{there.save_id}"]


# --- what a new attempt makes of it


def test_what_has_all_local_receipts_is_adopted_if_it_is_nowhere_else(
    run: Run, disks: list[LocalDisk]
) -> None:
    run.attempt(0)
    whole = _kept(run, disks, 0, 10, counter=1)
    _kept(run, disks[:1], 0, 20, counter=2)
    shared = _kept(run, disks, 0, 30, counter=3)
    for rank in range(WORLD_SIZE):
        shared.write(rank)
    run.close(0)
    run.attempt(1)
    assert _outcomes(run, 1) == {
        "global_step10.s0001": "swept",
        "global_step10.s0001.local": "local",
        "global_step20.s0002": "swept",
        "global_step20.s0002.local": "swept",
        "global_step30.s0003": "done",
        "global_step30.s0003.local": "swept",
    }
    assert _published(run) == [f"global_step10.{whole.save_id}"]
    assert files.listing(run.directory.attempt(0).closed) == ["trash"]


@pytest.fixture
def both(run: Run, disks: list[LocalDisk]) -> dict[int, Save]:
    """Attempt 0: step 10 is committed, 20 in the local tier, 30 in both; it is over."""
    run.attempt(0)
    saves = {10: run.commit(0, 10, counter=1)}
    for counter, step in ((2, 20), (3, 30)):
        saves[step] = _kept(run, disks, 0, step, counter)
        assert saves[step].publish_locally(0) is Published.DONE
    for rank in range(WORLD_SIZE):
        saves[30].write(rank)
    saves[30].publish(0)
    run.close(0)
    run.attempt(1)
    return saves


def _found(choice: Choice) -> list[tuple[int, bool]]:
    return [(one.manifest.step, one.is_local) for one in choice.candidates]


def test_candidates_are_of_both_tiers_newest_first_and_each_save_once(
    run: Run, both: dict[int, Save]
) -> None:
    del both
    choice = choose(run.directory, 1, AUTO, WORLD_SIZE)
    assert _found(choice) == [(30, False), (20, True), (10, False)]
    assert not choice.starts_fresh
    assert _found(choose(run.directory, 1, MUST, WORLD_SIZE)) == [(30, False)]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [(None, "set checkpoint.local_dir"), (3, "it takes 2 ranks, this run has 3")],
)
def test_what_cannot_be_used_from_here_is_passed_over_with_the_reason(
    run: Run, both: dict[int, Save], ranks: int | None, reason: str
) -> None:
    choice = choose(run.directory, 1, AUTO, ranks)
    assert _found(choice) == [(30, False), (10, False)]
    (passed,) = choice.passed_over
    assert reason in passed.reason
    with pytest.raises(NothingToResumeError, match=reason):
        choose(run.directory, 1, "global_step20", ranks)
    assert both[20].save_id in passed.path


def test_the_newest_may_be_local_and_must_takes_it(run: Run, disks: list[LocalDisk]) -> None:
    run.attempt(0)
    run.commit(0, 10, counter=1)
    newest = _kept(run, disks, 0, 20, counter=2)
    newest.publish_locally(0)
    run.close(0)
    run.attempt(1)
    must = choose(run.directory, 1, MUST, WORLD_SIZE)
    assert _found(must) == [(20, True), (10, False)], "no damage, if a rank does not have its file"
    for name in ("global_step20", f"global_step20.{newest.save_id}"):
        named = choose(run.directory, 1, name, WORLD_SIZE)
        assert (_found(named), named.is_named) == ([(20, True)], True)


def test_a_run_that_committed_only_locally_may_begin_anew_without_damage(
    run: Run, disks: list[LocalDisk]
) -> None:
    run.attempt(0)
    save = _kept(run, disks, 0, 20)
    save.publish_locally(0)
    assert choose(run.directory, 1, AUTO, WORLD_SIZE).starts_fresh
    assert not choose(run.directory, 1, MUST, WORLD_SIZE).starts_fresh
    other = _kept(run, disks, 0, 30, counter=2)
    other.publish_locally(0)
    path = Path(run.directory.local_save("global_step30", other.save_id), names.MANIFEST_NAME)
    path.write_bytes(path.read_bytes()[:-5])
    choice = choose(run.directory, 1, AUTO, WORLD_SIZE)
    assert not choice.starts_fresh
    assert [passed.damaged for passed in choice.passed_over] == [True]


def test_of_the_local_tier_only_what_is_continued_from_stays(
    run: Run, both: dict[int, Save]
) -> None:
    step_20 = choose(run.directory, 1, "global_step20", WORLD_SIZE).candidates[0].manifest
    line, _ = takeover.begin(run.directory, 1, step_20)
    assert _published(run) == [f"global_step20.{both[20].save_id}"]
    assert run.tags() == ["global_step10"], "step 30 is off the line"
    assert line[-1] == (1, 20)
    run.attempt(2)  # this one dies before it has sent step 20 on
    run.close(1)
    assert _found(choose(run.directory, 2, AUTO, WORLD_SIZE)) == [(20, True), (10, False)]
    takeover.begin(run.directory, 2, None)
    assert _published(run) == []


def test_what_is_continued_from_does_not_stay_once_it_is_committed(
    run: Run, both: dict[int, Save]
) -> None:
    """As where its writer died between the commit and dropping it."""
    assert f"global_step30.{both[30].save_id}" in _published(run)
    newest = choose(run.directory, 1, AUTO, WORLD_SIZE).candidates[0].manifest
    takeover.begin(run.directory, 1, newest)
    assert _published(run) == []


# --- files on a node's own disk


def test_a_run_has_a_folder_of_its_own_for_ever(run: Run, tmp_path: Path) -> None:
    for number in (0, 1):
        run.attempt(number, Owner(ELSEWHERE, 1, 1, WORLD_SIZE, nonce=f"nonce{number}"))
    folder = local.make_folder(str(tmp_path / "disk"), local.run_of(run.directory), run.directory)
    assert folder == str(tmp_path / "disk" / "nonce0")
    assert os.listdir(folder) == []


def test_what_older_attempts_left_is_cleared_and_nothing_else(
    run: Run, disks: list[LocalDisk]
) -> None:
    owner = Owner(ELSEWHERE, 1, 1, WORLD_SIZE, nonce=NONCE)
    for number in (0, 1, 2):
        run.attempt(number, owner)
    gone = _kept(run, disks, 0, 10)
    moved_away = _kept(run, [replace(disks[0], rank=1)], 1, 20)
    parent = _kept(run, disks, 1, 30, counter=2)
    current = _kept(run, disks, 2, 40)
    copied = Path(disks[0].directory(str(names.SaveId(1, 9, "global_step50", "anotherrun"))))
    notes = Path(disks[0].root, "notes")
    for path in (copied, notes):
        path.mkdir()
        (path / "file").touch()
    assert local.clear(disks[0].root, run.directory, 2, parent.save_id) == []
    left = sorted(os.listdir(disks[0].root))
    assert left == sorted([parent.save_id, current.save_id, copied.name, "notes"])
    assert gone.save_id not in left
    assert moved_away.save_id not in left
    assert all(os.path.exists(disk.file(parent.save_id)) for disk in disks)
    assert (copied / "file").exists()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("checkpoints", "is checkpoint.dir="),
        ("checkpoints/local", "or in it"),
        ("link", "is checkpoint.dir="),
        ("file", "does not serve on this node"),
        ("/proc/nowhere", "does not serve on this node"),
    ],
)
def test_a_local_dir_that_does_not_serve_is_refused(
    run: Run, tmp_path: Path, place: str, reason: str
) -> None:
    run.attempt(0)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(run.directory.root)
    with pytest.raises(UnsuitableDirectoryError, match=reason) as refused:
        local.make_folder(str(tmp_path / place), local.run_of(run.directory), run.directory)
    assert "checkpoint.local_dir=" in str(refused.value)
