"""The records of a run survive attempts that were killed while they wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher.run_directory import JsonLines, RunDirectory


def test_lines_are_there_as_soon_as_they_are_written_and_floats_are_exact(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "deep" / "metrics.jsonl")
    loss = 0.1 + 0.2
    lines.append({"loss": loss})
    assert repr(loss) in (tmp_path / "deep" / "metrics.jsonl").read_text()
    lines.append({"loss": 1e-300})
    lines.close()
    assert lines.read() == [{"loss": loss}, {"loss": 1e-300}]


def test_a_torn_last_line_spoils_neither_the_next_nor_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    lines = JsonLines(path)
    lines.append({"step": 2})
    lines.close()
    assert [record["step"] for record in lines.read()] == [1, 2]
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 2}


def test_a_full_disk_loses_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = JsonLines(Path("/dev/full"))
    for step in (1, 2):
        full.append({"step": step})
    full.close()
    assert full.lost == 2
    assert [record.message for record in caplog.records] == [
        "cannot write /dev/full: [Errno 28] No space left on device; its records are lost"
    ]
    lines = JsonLines(tmp_path / "metrics.jsonl")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
        lines.append({"step": 1})  # the disk fills up in the middle of a line
    lines.append({"step": 2})
    lines.close()
    assert lines.lost == 1
    assert lines.read() == [{"step": 2}]


def test_settings_that_an_attempt_left_in_pieces_are_those_of_the_one_before(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(str(tmp_path))
    directory.keep_settings(3, {"seed": 1})
    for attempt, content in ((4, b"\xff\x00"), (5, b'{"seed": 2'), (6, b"[]")):
        directory.log_file(attempt, 0)
        (tmp_path / "logs" / f"attempt_{attempt:04d}" / "settings.json").write_bytes(content)
    assert directory.settings_before(9) == {"seed": 1}
    assert directory.settings_before(3) is None


def test_the_first_configuration_is_kept(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    directory.keep_first_configuration({"seed": 1, "data": {"text": "a: b"}})
    first = (tmp_path / "config.yaml").read_text()
    directory.keep_first_configuration({"seed": 2})
    assert (tmp_path / "config.yaml").read_text() == first
    assert "seed: 1" in first


def test_each_attempt_has_a_log_per_rank(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path))
    assert directory.log_file(7, 3) == tmp_path / "logs" / "attempt_0007" / "rank_00003.log"
    assert directory.log_file(7, 4).parent.is_dir()
