"""Rollbacks on record: which samples, which checkpoints, how many, and damaged records."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.format.manifest import Draft
from engine.stream import Component, Stream
from engine.stream.skips import Skips
from launcher.errors import ConfigError
from launcher.guards.guard import SPIKE, Alarm
from launcher.guards.rollback import (
    RefusedRollbackError,
    Rollbacks,
    newest_sound,
    why_spoilt,
    window,
)
from launcher.guards.settings import GuardSettings
from launcher.run_directory import JsonLines
from tests.format import build
from tests.guards.test_guard import SETTINGS

ALARM = Alarm(SPIKE, 12, 9.5, "the loss is high", "rollback")


def rollbacks(directory: Path) -> Rollbacks:
    return Rollbacks(JsonLines(directory / "rollbacks.jsonl"))


def saved_at(step: int, skip: Any = ()) -> Draft:
    """A checkpoint after steps of 8 samples, of a run that left `skip` out."""
    data = Stream([Component("a", range(1000))], seed=1, skip=skip).fingerprint()
    fingerprint = json.loads(json.dumps({"data": data}))
    return replace(build.draft(), step=step, sample_offset=8 * step, fingerprint=fingerprint)


def settings(**changed: Any) -> GuardSettings:
    return GuardSettings(**(SETTINGS | changed))


def test_the_window_is_of_the_alarms_step_and_its_neighbours_in_global_indices() -> None:
    def of(skips: Skips, **changed: Any) -> tuple[int, int]:
        return window(settings(**changed), skips, sample_offset=96, global_batch_size=8)

    assert of(Skips(), skip_steps_before=0) == (88, 96)
    assert of(Skips(), skip_steps_before=2, skip_steps_after=1) == (72, 104)
    assert of(Skips(), skip_steps_before=1000) == (0, 96)
    assert of(Skips([[0, 10]]), skip_steps_before=0) == (98, 106)
    assert of(Skips([[90, 100]]), skip_steps_before=0) == (88, 106), "around what is out already"


def test_a_checkpoint_is_spoilt_by_samples_that_it_has_used_and_by_no_others() -> None:
    assert why_spoilt(saved_at(11), [(88, 96)]) == ""
    assert why_spoilt(saved_at(12), [(88, 96)]).startswith("it has used samples of 88 to 96")
    assert why_spoilt(saved_at(12), [(95, 200)]) != "", "one sample is enough"
    assert why_spoilt(saved_at(12), [(96, 104)]) == ""
    after = saved_at(12, skip=[[88, 96]])
    assert why_spoilt(after, [(88, 96)]) == "", "it was trained without them"
    assert why_spoilt(after, [(88, 96), (100, 104)]).startswith("it has used samples of 100 to 104")
    newest_first = [saved_at(15), saved_at(12), saved_at(10), saved_at(5)]
    sound = newest_sound(newest_first, [(88, 96)])
    assert sound is not None
    assert sound.step == 10
    assert newest_sound(newest_first, [(3, 4)]) is None
    foreign = replace(build.draft(), fingerprint="of another loop")
    assert why_spoilt(foreign, [(0, 1)]) == ""


def test_a_rollback_is_on_record_when_it_returns(tmp_path: Path) -> None:
    target = rollbacks(tmp_path).go_back(ALARM, 3, (88, 96), 2, [saved_at(12), saved_at(10)])
    assert target.step == 10
    (line,) = (tmp_path / "rollbacks.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "attempt": 3,
        "step": 12,
        "kind": "spike",
        "loss": "9.5",
        "to_step": 10,
        "skip": [88, 96],
    }
    assert rollbacks(tmp_path).ranges() == [(88, 96)]


def test_there_is_an_end_to_going_back(tmp_path: Path) -> None:
    committed = [saved_at(12), saved_at(10)]
    rollbacks(tmp_path).go_back(ALARM, 3, (88, 96), 1, committed)
    with pytest.raises(RefusedRollbackError, match=r"all of guard\.max_rollbacks=1 have been made"):
        rollbacks(tmp_path).go_back(ALARM, 4, (96, 104), 1, committed)
    with pytest.raises(RefusedRollbackError, match="no checkpoint is left"):
        rollbacks(tmp_path).go_back(ALARM, 4, (79, 104), 2, committed)
    assert rollbacks(tmp_path).ranges() == [(88, 96)], "what was refused is not on record"


def test_a_line_that_was_cut_short_was_no_rollback(tmp_path: Path) -> None:
    (tmp_path / "rollbacks.jsonl").write_text('{"skip": [900, 901]}\n{"skip": [88')
    assert rollbacks(tmp_path).ranges() == [(900, 901)]
    rollbacks(tmp_path).go_back(ALARM, 3, (88, 96), 9, [saved_at(10)])
    assert rollbacks(tmp_path).ranges() == [(900, 901), (88, 96)]


@pytest.mark.parametrize("line", ['{"skip": [96, 88]}', '{"skip": [1.5, 8]}', '{"step": 3}', "[1]"])
def test_a_record_of_something_else_is_an_error_that_names_the_file(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "rollbacks.jsonl").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"rollbacks\.jsonl: found .*wanted the record"):
        rollbacks(tmp_path).ranges()


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "rollbacks.jsonl"
    for damaged in (b"\xff\n", b'{"skip": [3 4]}\n', b'"skip": [3, 4]}\n'):
        path.write_bytes(b'{"skip": [1, 2]}\n' + damaged)
        with pytest.raises(ConfigError, match=r"rollbacks\.jsonl, the record of rollbacks"):
            rollbacks(tmp_path).ranges()
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        rollbacks(tmp_path).ranges()


def test_a_rollback_that_a_disk_does_not_take_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        rollbacks(tmp_path).go_back(ALARM, 3, (88, 96), 2, [saved_at(10)])
