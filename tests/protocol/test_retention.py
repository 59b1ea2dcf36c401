"""Which committed tags may go."""

import os

import pytest

from engine.format.names import tag_of
from engine.protocol import files, retention, takeover
from engine.protocol.files import Renamed
from engine.protocol.history import Link
from tests.protocol.saves import Run

LINE = (Link(0, 0), Link(2, 20))


def _steps(run: Run) -> list[int]:
    return sorted(manifest.step for manifest in takeover.committed(run.directory)[0])


def _fill(run: Run) -> None:
    """Attempt 0 saved 10 and 20, 1 went astray, and 2 went on from 20."""
    for number in range(3):
        run.attempt(number)
    run.commit(0, 10, 1)
    run.commit(0, 20, 2)
    run.commit(1, 15, 1)


@pytest.mark.parametrize(
    ("saved", "keep_last", "pruned"),
    [
        ([], 1, [10]),
        ([], 2, []),
        ([30], 2, [10]),
        ([30, 40], 2, [10, 20]),
        ([30, 40], 3, [10]),
        ([30, 40], 9, []),
    ],
)
def test_the_newest_of_the_own_line_are_kept(
    run: Run, saved: list[int], keep_last: int, pruned: list[int]
) -> None:
    """So the tag that was resumed from, 20, goes only when newer ones fill keep_last."""
    _fill(run)
    for counter, step in enumerate(saved, start=1):
        run.commit(2, step, counter)
    before = _steps(run)
    assert sorted(retention.prune(run.directory, 2, LINE, keep_last)) == [
        tag_of(step) for step in pruned
    ]
    assert _steps(run) == [step for step in before if step not in pruned]
    assert os.listdir(run.directory.attempt(2).trash) == []


def test_tags_off_the_line_are_nobodys_to_delete(run: Run) -> None:
    _fill(run)
    run.commit(2, 30, 1)
    retention.prune(run.directory, 2, LINE, 1)
    assert _steps(run) == [15, 30]


def test_a_fenced_attempt_prunes_nothing(run: Run) -> None:
    _fill(run)
    run.close(2)
    assert retention.prune(run.directory, 2, LINE, 1) == []
    assert _steps(run) == [10, 15, 20]


def test_a_tag_that_was_on_its_way_out_when_the_attempt_was_closed_comes_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(run)
    run.commit(2, 30, 1)
    real = files.rename_new
    closed = []

    def close_behind(source: str, target: str) -> Renamed:
        outcome = real(source, target)
        closed.append(source)
        run.close(2)
        return outcome

    monkeypatch.setattr(files, "rename_new", close_behind)
    assert retention.prune(run.directory, 2, LINE, 1) == []
    monkeypatch.undo()
    assert closed == [run.directory.tag("global_step20")]
    assert _steps(run) == [10, 15, 30]
    run.attempt(3)
    takeover.adopt(run.directory, 3)
    assert _steps(run) == [10, 15, 20, 30]


def test_a_tag_that_is_gone_already_is_passed_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(run)
    run.commit(2, 30, 1)
    monkeypatch.setattr(files, "rename_new", lambda source, target: Renamed.GONE)
    assert retention.prune(run.directory, 2, LINE, 1) == []
    assert _steps(run) == [10, 15, 20, 30]
