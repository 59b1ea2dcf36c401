"""Which committed tags may go."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.format import tree
from engine.format.manifest import Manifest
from engine.format.names import SaveId, tag_of
from engine.protocol import adoption, files, history, retention, takeover
from engine.protocol.files import Renamed
from engine.protocol.history import Link
from engine.protocol.layout import MANIFEST
from engine.protocol.retention import Committed, KeepBest, Retention
from tests.protocol.driver.content import make_draft
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
    assert sorted(retention.prune(run.directory, 2, LINE, Retention(keep_last))) == [
        tag_of(step) for step in pruned
    ]
    assert _steps(run) == [step for step in before if step not in pruned]
    assert os.listdir(run.directory.attempt(2).trash) == []


def test_tags_off_the_line_are_nobodys_to_delete(run: Run) -> None:
    _fill(run)
    run.commit(2, 30, 1)
    retention.prune(run.directory, 2, LINE, Retention(1))
    assert _steps(run) == [15, 30]


def test_a_fenced_attempt_prunes_nothing(run: Run) -> None:
    _fill(run)
    run.close(2)
    assert retention.prune(run.directory, 2, LINE, Retention(1)) == []
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
    assert retention.prune(run.directory, 2, LINE, Retention(1)) == []
    monkeypatch.undo()
    assert closed == [run.directory.tag("global_step20")]
    assert _steps(run) == [10, 15, 30]
    run.attempt(3)
    adoption.adopt(run.directory, 3)
    assert _steps(run) == [10, 15, 20, 30]


def test_what_is_known_of_a_tag_is_not_read_again(run: Run) -> None:
    _fill(run)
    run.commit(2, 30, 1)
    known: dict[str, Committed] = {}
    retention.prune(run.directory, 2, LINE, Retention(2), known)
    assert set(known) == {tag_of(step) for step in (10, 15, 20, 30)}
    Path(run.directory.tag("global_step15"), MANIFEST).write_text("unreadable by now")
    run.commit(2, 40, 2)
    assert retention.prune(run.directory, 2, LINE, Retention(2), known) == ["global_step20"]
    assert set(known) == {tag_of(step) for step in (15, 20, 30, 40)}
    retention.prune(run.directory, 2, LINE, Retention(2), known)
    assert set(known) == {tag_of(step) for step in (15, 30, 40)}


def test_a_tag_whose_manifest_is_damaged_is_nobodys_to_delete(run: Run) -> None:
    _fill(run)
    run.commit(2, 30, 1)
    path = Path(run.directory.tag("global_step10"), MANIFEST)
    path.write_bytes(path.read_bytes()[:-5])
    assert retention.prune(run.directory, 2, LINE, Retention(1)) == ["global_step20"]
    assert path.exists()


def test_a_tag_that_is_gone_already_is_passed_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(run)
    run.commit(2, 30, 1)
    monkeypatch.setattr(files, "rename_new", lambda source, target: Renamed.GONE)
    assert retention.prune(run.directory, 2, LINE, Retention(1)) == []
    assert _steps(run) == [10, 15, 20, 30]


def _committed(attempt: int, step: int, metrics: Mapping[str, object] | None = None) -> Committed:
    draft = make_draft(SaveId(attempt, step, tag_of(step), "5ca1ab1e"), 1, 7, ((attempt, 0),), None)
    state = {} if metrics is None else {"metrics": tree.encode(dict(metrics), "metrics")}
    return Committed.of(Manifest(**vars(replace(draft, state=state)), shards=()))


_VALUES = st.none() | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0, 2.5, 3])
_BEST = st.builds(KeepBest, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4))
_RETENTIONS = st.builds(
    Retention, st.integers(1, 5), st.none() | st.integers(1, 30), st.none() | _BEST
)


@given(
    saved=st.dictionaries(st.integers(0, 60), st.tuples(st.integers(0, 3), _VALUES), max_size=12),
    keep=_RETENTIONS,
    shuffled=st.randoms(use_true_random=False),
)
def test_a_tag_goes_exactly_when_no_rule_keeps_it(
    saved: dict[int, tuple[int, float | None]], keep: Retention, shuffled: object
) -> None:
    tags = [
        _committed(attempt, step, None if value is None else {"loss": value})
        for step, (attempt, value) in saved.items()
    ]
    shuffled.shuffle(tags)  # type: ignore[attr-defined]
    own = {
        step: value
        for step, (attempt, value) in saved.items()
        if history.covers(LINE, attempt, step)
    }

    def is_kept(step: int) -> bool:
        if sum(other > step for other in own) < keep.keep_last:
            return True
        if keep.keep_every_steps is not None and step % keep.keep_every_steps == 0:
            return True
        return keep.keep_best is not None and is_among_the_best(step, keep.keep_best)

    def is_among_the_best(step: int, best: KeepBest) -> bool:
        sign = 1 if best.mode == "min" else -1
        scores = {s: (sign * v, -s) for s, v in own.items() if v is not None and not math.isnan(v)}
        return step in scores and sum(s < scores[step] for s in scores.values()) < best.count

    going = [tag.step for tag in retention.expired(tags, LINE, keep)]
    assert going == sorted((step for step in own if not is_kept(step)), reverse=True)


def test_a_metric_is_a_number_that_the_save_was_given() -> None:
    committed = _committed(0, 10, {"loss": math.inf, "name": "x", "count": 2, "is_good": True})
    assert committed.metrics == {"loss": math.inf, "count": 2.0}
    assert _committed(0, 10).metrics == {}


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Retention(0), "keep_last is 0"),
        (lambda: Retention(1, 0), "keep_every_steps is 0"),
        (lambda: KeepBest(""), "keep_best.metric is empty"),
        (lambda: KeepBest("loss", "lowest"), "'lowest', wanted min or max"),
        (lambda: KeepBest("loss", "min", 0), "keep_best.count is 0"),
    ],
)
def test_a_rule_that_keeps_nothing_is_refused(build: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()  # type: ignore[operator]
