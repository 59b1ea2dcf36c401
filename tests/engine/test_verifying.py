"""`python -m engine verify --all`: what a person reads at its end, and a program."""

import json
import os
import re
from pathlib import Path

import pytest

from engine import inspect
from engine.__main__ import main
from engine.format import names
from tests.format import build

SAVE_IDS = (
    "a0007.s0011.global_step300.5ca1ab1e",
    "a0007.s0012.global_step400.5ca1ab1e",
    "a0007.s0013.global_step500.5ca1ab1e",
)
STRAY = "a0006.s0009.global_step450.5ca1ab1e"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Three committed checkpoints of two ranks, a stray, and one in the local tier only."""
    directory = tmp_path / "run" / "checkpoints"
    for save_id in SAVE_IDS:
        build.checkpoint(directory, build.draft(2, save_id))
    for place, save_id in ((".stray", STRAY), (".local", "a0007.s0014.global_step600.5ca1ab1e")):
        made = build.checkpoint(directory / place, build.draft(2, save_id))
        made.rename(made.with_name(f"{made.name}.{save_id}"))
    return directory


def verify(
    capsys: pytest.CaptureFixture[str], directory: Path, *options: str
) -> tuple[int, str, str]:
    code = main(["verify", str(directory), *options])
    captured = capsys.readouterr()
    return code, re.sub(r"in \d+\.\d s", "in 0.0 s", captured.out), captured.err


def test_what_is_intact_is_summed_up(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(capsys, checkpoints.parent, "--all") == (
        0,
        "global_step300: intact\n"
        "global_step400: intact\n"
        "global_step500: intact\n"
        "not read: 1 stray; --strays reads them, too\n"
        "not read: 1 checkpoint on the nodes' own disks only\n"
        "3 checkpoints, 6 shards, 24.9 KiB read in 0.0 s: 3 intact\n",
        "",
    )


def test_strays_are_read_where_asked_for(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stray = checkpoints / ".stray" / f"global_step450.{STRAY}"
    build.flip(stray / names.shard_name(1, 2), -1)
    code, out, _ = verify(capsys, checkpoints, "--all", "--strays")
    lines = out.splitlines()
    assert code == 1
    assert lines[3].startswith(f"{stray.name}/{names.shard_name(1, 2)}: data: digest is ")
    assert lines[4] == "not read: 1 checkpoint on the nodes' own disks only"
    assert lines[5].endswith(": 3 intact, 1 damaged")
    assert verify(capsys, checkpoints, "--strays") == (
        2,
        "",
        "engine: --strays goes with --all; one of them is named with --tag\n",
    )


def test_each_outcome_is_counted_and_none_hides_another(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage, a directory that cannot be opened, and one that retention removes meanwhile."""
    build.flip(checkpoints / "global_step300" / names.receipt_name(1, 2), 40)
    open_directory = inspect.open_directory

    def open_or_not(path: str) -> int:
        if path.endswith("400"):
            raise PermissionError(13, "Permission denied")
        if path.endswith("500"):
            raise FileNotFoundError(2, "No such file or directory")
        return open_directory(path)

    monkeypatch.setattr(inspect, "open_directory", open_or_not)
    code, out, err = verify(capsys, checkpoints, "--all")
    at = os.path.realpath(checkpoints)
    assert code == 1
    assert out.splitlines()[-1] == (
        "3 checkpoints, 2 shards, 8.3 KiB read in 0.0 s: "
        "1 damaged, 1 cannot be read, 1 removed meanwhile"
    )
    assert err == (
        f"engine: {at}/global_step400: cannot be opened: Permission denied\n"
        f"engine: {at}/global_step500: is no longer there\n"
    )


def test_json_is_for_programs(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build.flip(checkpoints / "global_step400" / names.shard_name(0, 2), -1)
    code, out, _ = verify(capsys, checkpoints, "--all", "--json")
    told = json.loads(out)
    assert code == 1
    assert told["ok"] is False
    assert [one["outcome"] for one in told["checkpoints"]] == ["intact", "damaged", "intact"]
    damaged = told["checkpoints"][1]
    assert (damaged["name"], damaged["shards"]) == ("global_step400", 2)
    (problem,) = damaged["problems"]
    assert (problem["file"], problem["part"]) == (names.shard_name(0, 2), "data")
    assert told["not_read"]["strays"] == [f"global_step450.{STRAY}"]
    assert len(told["not_read"]["only_local"]) == 1
    code, out, _ = verify(capsys, checkpoints, "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
