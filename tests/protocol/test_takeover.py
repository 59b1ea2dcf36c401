"""What a new attempt does with what older ones left."""

import os
from pathlib import Path

import pytest

from engine.format import names
from engine.format.manifest import Manifest
from engine.protocol import adoption, commit, retention, takeover
from engine.protocol.history import Link
from engine.protocol.layout import MANIFEST
from tests.protocol.driver.content import read_whole
from tests.protocol.saves import WORLD_SIZE, Run


def _adopt(run: Run, me: int) -> dict[str, str]:
    """Start attempt `me` and adopt; return what became of each save."""
    run.attempt(me)
    return {save.save: save.outcome for save in adoption.adopt(run.directory, me)}


def _trash(run: Run, number: int) -> list[str]:
    return sorted(os.listdir(run.directory.attempt(number).trash))


def _closed_trash(run: Run, number: int) -> str:
    return os.path.join(run.directory.attempt(number).closed, "trash")


def test_whole_saves_are_adopted_and_others_swept(run: Run) -> None:
    run.attempt(0)
    whole, part = run.save(0, 10, counter=1), run.save(0, 11, counter=2, ranks=[0])
    nothing = run.save(0, 12, counter=3, ranks=[])
    no_draft = run.save(0, 13, counter=4, ranks=[1])
    run.close(0)
    assert _adopt(run, 1) == {
        whole.name: "done",
        part.name: "swept",
        nothing.name: "swept",
        no_draft.name: "swept",
    }
    assert run.tags() == ["global_step10"]
    assert read_whole(run.directory.tag("global_step10")).save_id == whole.save_id
    assert os.listdir(run.directory.attempt(0).closed) == ["trash"]
    assert len(_trash(run, 1)) == 3


def test_saves_of_an_attempt_that_is_open_are_left_alone(run: Run) -> None:
    run.attempt(0)
    save = run.save(0, 10)
    assert _adopt(run, 1) == {}
    assert os.path.exists(save.path)


def test_a_damaged_receipt_is_swept_with_its_reason(run: Run) -> None:
    run.attempt(0)
    save = run.save(0, 10)
    receipt = Path(save.path, names.receipt_name(1, WORLD_SIZE))
    receipt.write_bytes(receipt.read_bytes().replace(b"seconds", b"sekunds"))
    run.close(0)
    run.attempt(1)
    (taken,) = adoption.adopt(run.directory, 1)
    assert (taken.attempt, taken.save, taken.outcome) == (0, save.name, "swept")
    assert names.receipt_name(1, WORLD_SIZE) in taken.reason
    assert run.tags() == []


def test_of_two_attempts_that_saved_a_step_the_higher_ones_tag_stays(run: Run) -> None:
    run.attempt(0)
    lower = run.save(0, 10)
    run.close(0)
    run.attempt(1)
    higher = run.save(1, 10)
    run.close(1)
    assert _adopt(run, 2) == {higher.name: "done"} | {lower.name: "done"}
    assert run.holder(10) == higher.save_id
    assert run.strays() == [f"global_step10.{lower.save_id}"]


def test_a_lower_attempts_save_does_not_replace_a_higher_ones_tag(run: Run) -> None:
    run.attempt(0)
    lower = run.save(0, 10)
    run.attempt(1)
    higher = run.commit(1, 10)
    run.close(0)
    run.close(1)
    assert _adopt(run, 2) == {lower.name: "swept"}
    assert run.holder(10) == higher.save_id


def test_a_second_copy_of_a_committed_save_is_swept(run: Run) -> None:
    """A writer that was replaced between the commit and its report may have made it."""
    run.attempt(0)
    first = run.commit(0, 10)
    copy = run.save(0, 10)
    run.close(0)
    assert _adopt(run, 1) == {copy.name: "swept"}
    assert run.holder(10) == first.save_id
    assert os.listdir(run.directory.attempt(0).closed) == ["trash"]


def test_a_save_whose_shard_has_gone_is_swept(run: Run) -> None:
    run.attempt(0)
    save = run.save(0, 10)
    os.unlink(os.path.join(save.path, names.shard_name(1, WORLD_SIZE)))
    run.close(0)
    assert _adopt(run, 1) == {save.name: "swept"}
    assert run.tags() == []


def test_saves_of_one_name_from_two_attempts_are_both_swept(run: Run) -> None:
    for number in (0, 1):
        run.attempt(number)
        run.save(number, 10, ranks=[0])
        run.close(number)
    _adopt(run, 2)
    assert len(_trash(run, 2)) == 2


def test_what_was_swept_by_an_attempt_that_died_is_swept_on_under_its_name(run: Run) -> None:
    run.attempt(0)
    run.save(0, 10, ranks=[0])
    run.close(0)
    _adopt(run, 1)
    (name,) = _trash(run, 1)
    run.close(1)
    _adopt(run, 2)
    assert _trash(run, 2) == [name]
    assert os.listdir(_closed_trash(run, 1)) == []


def test_a_tag_whose_removal_was_not_begun_is_put_back(run: Run) -> None:
    run.attempt(0)
    save = run.commit(0, 10)
    trash = run.directory.attempt(0).trash
    os.rename(run.directory.tag("global_step10"), f"{trash}/global_step10.{save.save_id}")
    run.close(0)
    _adopt(run, 1)
    assert run.holder(10) == save.save_id
    assert os.listdir(_closed_trash(run, 0)) == []


def test_a_tag_whose_removal_was_begun_is_swept(run: Run) -> None:
    run.attempt(0)
    save = run.commit(0, 10)
    trash = run.directory.attempt(0).trash
    os.rename(run.directory.tag("global_step10"), f"{trash}/global_step10.{save.save_id}")
    os.unlink(f"{trash}/global_step10.{save.save_id}/{MANIFEST}")
    run.close(0)
    _adopt(run, 1)
    assert run.tags() == []
    assert os.listdir(_closed_trash(run, 0)) == []
    assert len(_trash(run, 1)) == 1


def test_an_abandoned_save_is_never_put_back_even_with_a_manifest(run: Run) -> None:
    run.attempt(0)
    save = run.save(0, 10)
    Path(save.path, MANIFEST).write_bytes(b"{}")
    os.rename(save.path, os.path.join(run.directory.attempt(0).trash, save.name))
    run.close(0)
    _adopt(run, 1)
    assert run.tags() == []
    assert len(_trash(run, 1)) == 1


def test_a_put_back_tag_does_not_replace_another(run: Run) -> None:
    run.attempt(0)
    old = run.commit(0, 10)
    trash = run.directory.attempt(0).trash
    os.rename(run.directory.tag("global_step10"), f"{trash}/global_step10.{old.save_id}")
    run.close(0)
    run.attempt(1)
    new = run.commit(1, 10)
    _adopt(run, 2)
    assert run.holder(10) == new.save_id
    assert os.listdir(_closed_trash(run, 0)) == []


def test_parts_and_pokes_of_killed_processes_are_swept(run: Run) -> None:
    run.attempt(0)
    run.commit(0, 10)
    attempt = run.directory.attempt(0)
    places = [run.directory.root, run.directory.attempts, attempt.path, attempt.open]
    for place in (*places, attempt.trash, run.directory.tag("global_step10")):
        for name in (".part.1.dead", ".poke.1.dead"):
            Path(place, name).touch()
    os.makedirs(os.path.join(run.directory.attempts, ".new.0001.dead.1", "open", "trash"))
    run.close(0)
    _adopt(run, 1)
    found = [
        os.path.join(parent, name)
        for parent, directories, names_ in os.walk(run.directory.root)
        for name in (*directories, *names_)
        if name.startswith((".part", ".poke", ".new"))
    ]
    assert found == []


def test_the_trash_of_a_new_attempt_is_emptied_by_its_writer(run: Run) -> None:
    run.attempt(0)
    run.save(0, 10, ranks=[0])
    run.close(0)
    _adopt(run, 1)
    retention.empty_trash(run.directory, 1)
    assert _trash(run, 1) == []


def test_committed_tells_tags_from_what_only_looks_like_one(run: Run) -> None:
    run.attempt(0)
    run.commit(0, 10)
    run.commit(0, 20, counter=2)
    run.commit(0, 30, counter=3)
    manifest = Path(run.directory.tag("global_step20"), MANIFEST)
    manifest.write_bytes(manifest.read_bytes()[:-2])
    os.mkdir(run.directory.tag("global_step40"))
    os.rename(run.directory.tag("global_step30"), run.directory.tag("global_step31"))
    manifests, passed_over = takeover.committed(run.directory)
    assert [m.step for m in manifests] == [10]
    assert {os.path.basename(p.path): p.damaged for p in passed_over} == {
        "global_step20": True,
        "global_step31": True,
        "global_step40": False,
    }


def test_candidates_are_those_on_the_newest_recorded_history(run: Run) -> None:
    run.attempt(0)
    for counter, step in enumerate((10, 20, 30), start=1):
        run.commit(0, step, counter)
    manifests, _ = takeover.candidates(run.directory, 1)
    assert [m.step for m in manifests] == [30, 20, 10], "nothing is recorded yet"
    run.attempt(1)
    resumed = commit.read_manifest(run.directory.tag("global_step20"))
    takeover.begin(run.directory, 1, resumed)
    run.attempt(2)  # died before it chose: records nothing
    manifests, _ = takeover.candidates(run.directory, 3)
    assert [m.step for m in manifests] == [20, 10]


def test_begin_records_the_line_then_sets_aside_what_is_off_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.attempt(0)
    for counter, step in enumerate((10, 20, 30), start=1):
        run.commit(0, step, counter)
    run.attempt(1)
    recorded_first = []
    real = commit.set_aside

    def set_aside(*arguments: object) -> bool:
        recorded_first.append(os.path.exists(run.directory.attempt(1).start))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(commit, "set_aside", set_aside)
    resumed = commit.read_manifest(run.directory.tag("global_step20"))
    assert resumed is not None
    line, strays = takeover.begin(run.directory, 1, resumed)
    assert line == (Link(0, 0), Link(1, 20))
    assert recorded_first == [True]
    assert [stray.step for stray in strays] == [30]
    assert run.tags() == ["global_step10", "global_step20"]
    assert [name.partition(".")[0] for name in run.strays()] == ["global_step30"]
    assert Path(run.directory.latest).read_text() == "global_step20\n"
    assert takeover.newest_start(run.directory, 2) == takeover.Start(line, resumed.save_id)


def test_a_fresh_start_sets_all_aside_and_begins_a_line_of_its_own(run: Run) -> None:
    run.attempt(0)
    run.commit(0, 10)
    run.attempt(1)
    line, strays = takeover.begin(run.directory, 1, None)
    assert line == (Link(1, 0),)
    assert [stray.step for stray in strays] == [10]
    assert run.tags() == []


def _stray_and_line(run: Run) -> tuple[Manifest, Manifest]:
    """Two saves of step 10: one on the line of attempt 1, the other set aside."""
    run.attempt(0)
    run.commit(0, 10)
    run.attempt(1)
    takeover.begin(run.directory, 1, None)
    run.commit(1, 10, history=[(1, 0)])
    stray = commit.read_manifest(os.path.join(run.directory.strays, run.strays()[0]))
    on_line = commit.read_manifest(run.directory.tag("global_step10"))
    assert stray is not None
    assert on_line is not None
    run.close(0)
    run.close(1)
    return stray, on_line


def test_a_stray_that_a_run_continues_from_takes_its_place_again(run: Run) -> None:
    stray, on_line = _stray_and_line(run)
    run.attempt(2)
    takeover.begin(run.directory, 2, stray)
    assert run.holder(10) == stray.save_id
    assert run.strays() == [f"global_step10.{on_line.save_id}"]
    manifests, _ = takeover.candidates(run.directory, 3)
    assert [m.save_id for m in manifests] == [stray.save_id]


def test_what_an_attempt_that_died_had_begun_is_finished_by_the_next(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray, _ = _stray_and_line(run)
    run.attempt(2)
    with monkeypatch.context() as patched:
        patched.setattr(commit, "set_aside", _die)
        with pytest.raises(KeyboardInterrupt):
            takeover.begin(run.directory, 2, stray)
    run.close(2)
    _adopt(run, 3)
    manifests, _ = takeover.candidates(run.directory, 3)
    assert [m.save_id for m in manifests] == [stray.save_id]
    assert run.holder(10) == stray.save_id


def _die(*arguments: object) -> bool:
    raise KeyboardInterrupt


def test_an_attempt_that_was_taken_over_while_it_began_moves_nothing_any_more(run: Run) -> None:
    """Its host slept: what the successor has committed by now is not on the line that it knows."""
    stray, _ = _stray_and_line(run)
    run.attempt(2)
    run.close(2)
    run.attempt(3)
    run.commit(3, 20, history=[(1, 0), (3, 10)])
    commit.point_latest(run.directory, "global_step20")

    def in_place() -> tuple[list[str], list[str], str | None, str]:
        return run.tags(), run.strays(), run.holder(10), Path(run.directory.latest).read_text()

    before = in_place()
    takeover.begin(run.directory, 2, stray)
    assert in_place() == before
