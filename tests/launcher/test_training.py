"""Real runs of `python -m launcher` on two ranks: to the end, stopped, failed, and refused."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from tests import tiny_run
from tests.launcher.local_runs import STEPS, bits, faulty, records, run, start, wait_for_step
from tests.seeing.documented import undocumented
from tests.slurm.cluster_job import wait_for
from tests.terminal import terminal


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    status = directory.with_name("status")
    code, said = run(directory, EVERSTEP_STATUS_FILE=str(status))
    assert code == 0, said
    assert status.read_text() == "0\n"
    return directory


def test_a_run_leaves_the_records_that_it_promises(reference: Path) -> None:
    metrics = records(reference, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert [line["sample_offset"] for line in metrics] == [8 * n for n in range(1, STEPS + 1)]
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5
    assert {line["attempt"] for line in metrics} == {0}
    events = records(reference, "events.jsonl")
    committed = [event["step"] for event in events if event["event"] == "committed"]
    assert committed == [5, 10, 15, 20]
    kinds = [line["event"] for line in records(reference, "attempts.jsonl")]
    assert kinds == ["bring_up", "start", "end"]
    assert records(reference, "attempts.jsonl")[-1]["exit_code"] == 0
    assert 'everstep_last_committed_step{run="run"} 20' in (reference / "metrics.prom").read_text()
    assert "width: 32" in (reference / "config.yaml").read_text()
    for rank in range(2):
        log = reference / "logs" / "attempt_0000" / f"rank_{rank:05d}.log"
        assert "staged" in log.read_text()
    assert undocumented(reference) == []


def test_the_command_line_sets_the_cadence_and_what_is_kept(
    reference: Path, tmp_path: Path
) -> None:
    code, said = run(
        tmp_path,
        "checkpoint.every_steps=3",
        "checkpoint.keep_last=2",
        "checkpoint.keep_every_steps=6",
        "checkpoint.keep_best={metric: loss, mode: max, count: 1}",
        "checkpoint.max_bytes_per_second=1e9",
        "checkpoint.paranoid=true",
    )
    assert code == 0, said
    events = records(tmp_path, "events.jsonl")
    committed = [event["step"] for event in events if event["event"] == "committed"]
    assert committed == [3, 6, 9, 12, 15, 18, 20]
    proven = [event["step"] for event in events if event["event"] == "proven"]
    unproven = [event["step"] for event in events if event["event"] == "unproven"]  # pruned before
    assert sorted(proven + unproven) == committed
    assert proven[-1] == 20
    tags = {path.name for path in (tmp_path / "checkpoints").glob("global_step*")}
    losses = {line["step"]: line["loss"] for line in records(tmp_path, "metrics.jsonl")}
    worst = max(committed, key=lambda step: losses[step])
    assert tags == {f"global_step{step}" for step in (6, 12, 18, 20, worst)}
    assert worst not in (6, 12, 18, 20), "the losses of this run fall"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step20\n"
    assert bits(tmp_path) == bits(reference), "saving must not change what is computed"


def test_planned_saves_come_when_the_plan_says_and_change_nothing(
    reference: Path, tmp_path: Path
) -> None:
    code, said = run(
        tmp_path,
        "checkpoint=auto",
        "checkpoint.every_steps=null",  # the experiment sets it
        "checkpoint.auto.mtbf_hours=1e-9",
    )
    assert code == 0, said
    assert "checkpoint=auto: a save every" in said
    assert "Saves and failures should take" in said
    committed = [event["step"] for event in tiny_run.events(tmp_path, "committed")]
    assert committed[0] == 1, "who dies that often saves at once"
    assert committed[-1] == STEPS
    assert bits(tmp_path) == bits(reference)


def test_a_complete_run_says_so_and_writes_nothing_over(reference: Path) -> None:
    before = (reference / "metrics.jsonl").read_bytes()
    code, said = run(reference)
    assert code == 0
    assert "is complete" in said
    assert (reference / "metrics.jsonl").read_bytes() == before


def test_a_terminal_shows_a_resume_and_saves_that_take_seconds(
    reference: Path, tmp_path: Path
) -> None:
    run_directory = tmp_path / "run"
    shutil.copytree(reference, run_directory)
    with terminal(100) as screen:
        process = start(
            run_directory,
            "train.steps=25",
            "checkpoint.max_bytes_per_second=100000",
            terminal=screen.descriptor,
            TERM="xterm",
        )
        said = screen.follow()
        assert process.wait() == 0, said
        assert "reading global_step20: " in said
        shares = [int(share) for share in re.findall(r"saving 25 (\d+)%", said)]
        assert shares == sorted(shares)
        assert any(0 < share < 100 for share in shares)
        bar, done = screen.lines()[-2:]
        assert re.fullmatch(r"25/25 100%\|█+\| loss .* tokens/s, committed 25 .* ago", bar)
        assert done == "done: 25 steps, and the checkpoint of the last is committed."


def test_another_seed_is_not_this_run(reference: Path) -> None:
    code, said = run(reference, "seed=5", "train.steps=40")
    assert code == 78
    lines = said.splitlines()
    at = next(i for i, line in enumerate(lines) if "another seed" in line)
    assert lines[at + 1].split() == ["in", "the", "checkpoint:", "1234"]
    assert lines[at + 2].split() == ["now:", "5"]


def test_a_stopped_run_goes_on_with_the_same_bits(reference: Path, tmp_path: Path) -> None:
    directory, status = tmp_path / "run", tmp_path / "status"
    overrides = ["checkpoint.every_steps=1000", "data.workers=1"]
    first = start(directory, *overrides, EVERSTEP_STATUS_FILE=str(status))
    wait_for_step(first, 1)
    assert status.read_text() == "started\n"
    for _ in range(3):  # one stop is often several signals
        first.send_signal(signal.SIGTERM)
    _, errors = first.communicate()
    assert first.returncode == 75, errors
    assert status.read_text() == "75\n"
    stopped_at = records(directory, "attempts.jsonl")[-1]["step"]
    assert 0 < stopped_at < STEPS
    assert (directory / "checkpoints" / f"global_step{stopped_at}").is_dir()

    code, said = run(directory, "launch.ranks=2")
    assert code == 0, said
    assert f"resumes at step {stopped_at}" in said
    assert bits(directory) == bits(reference)
    assert {line["attempt"] for line in records(directory, "metrics.jsonl")} == {0, 1}


def test_one_ranks_exception_ends_the_run_and_is_the_last_thing_said(
    reference: Path, tmp_path: Path
) -> None:
    directory, fired = tmp_path / "run", tmp_path / "fired"
    code, said = run(directory, *faulty("raise", rank=1, at_forward=15, fired=fired))
    assert fired.exists()
    assert code == 1, said
    assert said.splitlines()[-1] == "RuntimeError: a fault that a test declared"
    assert "everstep: rank 1 failed first" in said
    assert "end" in {line["event"] for line in records(directory, "attempts.jsonl")}
    assert bits(directory).items() <= bits(reference).items()


def test_a_failed_run_is_started_again_by_its_starter(reference: Path, tmp_path: Path) -> None:
    directory, fired = tmp_path / "run", tmp_path / "fired"
    fault = faulty("raise", rank=1, at_forward=15, fired=fired)
    code, said = run(directory, *fault, "launch.max_restarts=1")
    assert fired.exists()
    assert code == 0, said
    assert "everstep: starting again; 1 of launch.max_restarts=1 were left" in said
    assert bits(directory) == bits(reference)
    attempts = [r["attempt"] for r in records(directory, "attempts.jsonl") if r["event"] == "start"]
    assert attempts == [0, 1]


def test_a_step_that_never_ends_is_ended_with_every_threads_stack(tmp_path: Path) -> None:
    directory, fired = tmp_path / "run", tmp_path / "fired"
    code, said = run(
        directory,
        *faulty("hang", rank=0, at_forward=3, fired=fired),
        "launch.step_timeout_minutes=0.05",
    )
    assert fired.exists()
    assert code == 1, said
    assert "everstep: step took longer than launch.step_timeout_minutes=0.05" in said
    logs = directory / "logs" / "attempt_0000"
    hung, waiting = ((logs / f"rank_{rank:05d}.log").read_text() for rank in range(2))
    assert "faulty_model.py" in hung
    assert "thread MainThread" in waiting
    assert "faulty_model.py" not in waiting.rpartition("every thread's stack")[2]


def test_the_files_save_and_stop_are_followed_and_removed(reference: Path, tmp_path: Path) -> None:
    overrides = ["checkpoint.every_steps=1000", f"train.steps={STEPS}"]
    status = tmp_path.with_name("status")
    # Steps that are slow enough for the test to get a word in.
    slow = faulty("slow", rank=0, at_forward=1, fired=tmp_path / "fired")
    first = start(tmp_path, *overrides, *slow, EVERSTEP_STATUS_FILE=str(status))
    wait_for_step(first, 1)
    (tmp_path / "SAVE").touch()
    wait_for(lambda: bool(tiny_run.events(tmp_path, "committed")), 60, "saves")
    assert not (tmp_path / "SAVE").exists()
    (tmp_path / "STOP").touch()
    _, errors = first.communicate()
    assert first.returncode == 0, errors
    assert status.read_text() == "0\n", "a batch script must not start it again"
    assert "(the STOP file), saved" in errors
    assert not (tmp_path / "STOP").exists()
    saved, stopped = (event["step"] for event in tiny_run.events(tmp_path, "committed"))
    assert 0 < saved < stopped < STEPS
    code, said = run(tmp_path, *overrides, *slow)
    assert code == 0, said
    assert bits(tmp_path) == bits(reference)


def test_a_mistake_is_answered_before_any_rank_starts(tmp_path: Path) -> None:
    status = tmp_path / "status"
    code, said = run(tmp_path / "run", "batch.global_size=7", EVERSTEP_STATUS_FILE=str(status))
    assert code == 78
    assert said.startswith("everstep: batch.global_size=7")
    assert len(said.splitlines()) == 2
    assert status.read_text() == "78\n"
    assert not (tmp_path / "run").exists()


def test_a_mistake_that_only_the_ranks_can_find_is_said_once(tmp_path: Path) -> None:
    code, said = run(tmp_path / "run", "++model.layerz=3")
    assert code == 78
    assert said.count("layerz") == 1
    assert "Traceback" not in said
