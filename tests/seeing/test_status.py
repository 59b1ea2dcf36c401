"""`everstep status`: what a person reads, on records whose every second is known."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.describe import duration_text
from engine.format import names
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.owner import RUNNING, Beat, Owner, Place
from launcher.seeing import life, status
from launcher.seeing.summary import summarize
from tests.format import build
from tests.scripts import run_script
from tests.seeing.run_records import BEGINNING, Writer, known_run, unend

REPOSITORY = Path(__file__).parents[2]
NOW = BEGINNING.timestamp() + 1000


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The known run, complete, with its last checkpoint."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    known_run(tmp_path / "exp1")
    (tmp_path / "exp1" / "config.yaml").write_text("train: {steps: 60}\n")
    build.checkpoint(
        tmp_path / "exp1" / "checkpoints", build.draft(2, "a0002.s0001.global_step60.5ca1ab1e")
    )
    return tmp_path / "exp1"


def hold(directory: Path, owner: Owner) -> CheckpointDirectory:
    """Make the record of an attempt that goes on."""
    checkpoints = CheckpointDirectory(str(directory / "checkpoints"))
    attempt = checkpoints.attempt(owner.attempt)
    os.makedirs(attempt.open)
    Path(attempt.owner).write_bytes(owner.to_bytes())
    return checkpoints


def me(**changes: Any) -> Owner:
    return replace(Owner.this_process(2, {}), attempt=2, **changes)


def test_one_screen_tells_how_a_run_stands(run: Path) -> None:
    assert status.screen(summarize(run, NOW))[:8] == [
        "run exp1: complete",
        "step 60 of 60  loss 0.1667  10 s/step",
        "goodput 60.0% of 16 min 40 s  (down 17.8%, starting 8.5%, stopping 7.3%, lost 4.0%, "
        "resuming 1.5%, saving 0.9%); 4 steps lost",
        "",
        "ATTEMPT  BEGAN                FOR         FROM  TO  RANKS  STARTED BY  ENDED",
        "      0  2026-01-31 12:00:00  2 min 42 s     0  14     16  local       "
        "killed, or its host was lost",
        "      1  2026-01-31 12:05:00  4 min 20 s    10  30     16  srun        stopped: SIGUSR2",
        "      2  2026-01-31 12:10:00  6 min 40 s    30  60     16  srun        done",
    ]


def test_alarms_of_the_guards_are_told(run: Path) -> None:
    writer = Writer(run)
    told = [line for line in status.screen(summarize(run, NOW)) if "alarm" in line]
    assert told == []
    for at, step in ((450, 20), (460, 22)):
        writer.event(1, at, "alarm", step=step, kind="spike", loss="9.0")
    writer.event(1, 470, "alarm", kind="spike")  # of no step: a damaged line
    found = summarize(run, NOW)
    assert status.screen(found)[3] == (
        "2 alarms of the guards, the newest of step 22: events.jsonl says what"
    )
    assert status.as_json(found)["alarms"] == [20, 22]


def test_a_directory_of_runs_is_a_line_for_each(run: Path) -> None:
    other = Writer(run.with_name("exp2"))
    other.bring_up(0, 0)
    lines = status.table([summarize(path, NOW) for path in (run, other.path)])
    assert [line.split()[:3] for line in lines] == [
        ["RUN", "STEP", "OF"],
        ["exp1", "60", "60"],
        ["exp2", "0", "?"],
    ]
    assert lines[1].endswith("complete")


def test_programs_get_the_same_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["--json", str(run)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["total_steps"]) == ("complete", 60, 60)
    assert found["goodput"]["seconds"]["down"] == 178
    assert [attempt["exit_code"] for attempt in found["attempts"]] == [None, 75, 0]
    assert [one["tag"] for one in found["checkpoints"]] == ["global_step60"]


def test_a_live_run_shows_its_process_and_its_save(run: Path) -> None:
    unend(run)
    checkpoints = hold(run, me())
    save = Path(checkpoints.attempt(2).save("global_step70.s0009"))
    save.mkdir()
    (save / names.receipt_name(1, 2)).touch()
    (save / names.shard_name(1, 2)).write_bytes(bytes(1 << 20))
    (save / names.shard_name(0, 2)).write_bytes(bytes(1 << 19))
    found = summarize(run, NOW)
    assert found.life.state == life.RUNNING
    screen = status.screen(found)
    assert screen[0] == f"run exp1: running on this host, process {os.getpid()}"
    assert screen[7].endswith("not yet")
    assert "global_step70 is being saved: 1 of 2 shards, 1.5 MiB of about 8.3 KiB" in screen
    assert found.life.in_flight[0].words(None) == "being saved: 1 of 2 shards, 1.5 MiB"


def test_a_dead_process_is_not_taken_for_a_live_one(run: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    checkpoints = hold(run, me(pid=gone.pid, start_ticks=1))
    assert life.life_of(checkpoints).state == life.ENDED
    beat = Beat(1, RUNNING, os.getpid(), me().start_ticks, "here")
    Path(checkpoints.attempt(2).path, beat.name()).touch()
    assert life.life_of(checkpoints).state == life.FINISHING


def test_another_host_is_judged_by_the_age_of_its_beat(run: Path) -> None:
    checkpoints = hold(run, me(place=Place("node7", "boot", "pid:[1]")))
    assert life.life_of(checkpoints).state == life.UNKNOWN
    Path(checkpoints.attempt(2).path, Beat(1, RUNNING, 5, 6, "node7").name()).touch()
    found = life.life_of(checkpoints)
    assert found.state == life.RUNNING
    assert re.fullmatch(r"running on node7, last beat \d+ s ago", found.words)


@pytest.mark.parametrize("lost", ["attempts.jsonl", "metrics.jsonl", "events.jsonl", "config.yaml"])
@pytest.mark.parametrize("how", ["gone", "garbled"])
def test_what_is_damaged_is_a_note_and_never_a_traceback(run: Path, lost: str, how: str) -> None:
    (run / lost).unlink()
    if how == "garbled":
        (run / lost).write_bytes(b"\xff\x00{[\n" * 5)
    (run / "checkpoints" / "global_step60" / names.MANIFEST_NAME).write_bytes(b"{}")
    found = summarize(run, NOW)
    screen = status.screen(found)
    assert any(line.startswith(f"note: {lost}") for line in screen)
    assert any("global_step60" in line and "damaged" in line for line in screen)
    json.dumps(status.as_json(found))
    status.table([found])


def test_where_there_is_no_run_it_says_what_it_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main([str(tmp_path)]) == status.EXIT_USAGE
    assert "no run is here" in capsys.readouterr().err
    assert status.main([str(tmp_path / "nothing")]) == status.EXIT_USAGE


def test_a_run_that_was_moved_is_found_with_its_checkpoints(run: Path) -> None:
    (run / "config.yaml").write_text(
        f"train: {{steps: 60}}\ncheckpoint: {{dir: {run / 'checkpoints'}}}\n"
    )
    moved = run.with_name("moved")
    shutil.move(run, moved)
    assert len(summarize(moved, NOW).checkpoints) == 1


def test_the_command_imports_no_torch(run: Path) -> None:
    script = (
        "import sys\nfrom launcher.__main__ import main\n"
        "sys.argv = ['everstep', 'status', sys.argv[1]]\ncode = main()\n"
        "sys.exit(code or str({'torch', 'deepspeed', 'hydra', 'numpy'} & set(sys.modules) or '') )"
    )
    done = run_script(script, run)
    assert done.stderr.strip() in ("", "set()"), done.stderr
    assert done.stdout.startswith("run exp1: complete")


def test_a_reader_that_has_seen_enough_is_no_error(run: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "status", str(run)],
        cwd=REPOSITORY,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.6, "1 min"), (3599, "59 min 59 s"), (90061, "1 d 1 h"), (7200, "2 h")],
)
def test_durations_are_told_by_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
