"""Verdicts, the status file, and when an attempt counts as one without progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.protocol.layout import CheckpointDirectory
from launcher import requeue
from launcher.errors import ConfigError, NoProgressError
from launcher.rank import RankProcess
from launcher.requeue import AttemptLog, attempts_without_progress, check_progress, write_status
from launcher.run_directory import JsonLines
from launcher.stop import StopRequest
from launcher.topology import Topology


def attempt(name: str, from_step: int | None, exit_code: int | None) -> list[dict[str, Any]]:
    """The records of one attempt; None for the records that it did not come to write."""
    records: list[dict[str, Any]] = [{"event": "bring_up", "start_id": name}]
    if from_step is not None:
        records.append({"event": "start", "start_id": name, "from_step": from_step})
    if exit_code is not None:
        records.append({"event": "end", "start_id": name, "exit_code": exit_code})
    return records


CRASHED_AT_400 = [*attempt("a", 400, None), *attempt("b", 400, 1), *attempt("c", None, None)]


@pytest.mark.parametrize(
    ("records", "count"),
    [
        pytest.param([], 0, id="a first start"),
        pytest.param(CRASHED_AT_400, 3, id="killed, failed, and killed before it knew its step"),
        pytest.param(
            [*attempt("a", 300, None), *attempt("b", 400, None)], 1, id="progress in between"
        ),
        pytest.param(
            [*attempt("a", 400, None), *attempt("b", 400, requeue.SAVED)], 0, id="asked to stop"
        ),
        pytest.param(
            [*attempt("a", 400, requeue.SAVED), *attempt("b", 400, None)], 1, id="then a crash"
        ),
        pytest.param(
            [*CRASHED_AT_400, *attempt("d", None, requeue.BAD_CONFIG)], 3, id="then a typo"
        ),
        pytest.param(
            [*CRASHED_AT_400, *attempt("d", None, requeue.NO_PROGRESS)], 3, id="then a refusal"
        ),
    ],
)
def test_attempts_without_progress(records: list[dict[str, Any]], count: int) -> None:
    assert attempts_without_progress(records, 400) == count


def test_five_preemptions_with_progress_go_on_and_three_crashes_without_it_do_not() -> None:
    preempted = [record for n in range(5) for record in attempt(str(n), n * 100, requeue.SAVED)]
    check_progress(preempted, 500, limit=3)
    crashed_with_progress = [record for n in range(5) for record in attempt(str(n), n, None)]
    check_progress(crashed_with_progress, 5, limit=3)
    with pytest.raises(NoProgressError, match="last 3 attempts all began at step 400"):
        check_progress(CRASHED_AT_400, 400, limit=3)


def test_the_status_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "status"
    environ = {"EVERSTEP_STATUS_FILE": str(path)}
    write_status(environ, requeue.STARTED)
    assert path.read_text() == "started\n"
    write_status(environ, str(requeue.SAVED))
    assert path.read_text() == "75\n"
    assert list(tmp_path.iterdir()) == [path]
    write_status({}, "0")  # nobody asked
    assert path.read_text() == "75\n"


def process(rank: int, launch: str = "one") -> RankProcess:
    place = Topology(rank, 2, rank, 2, "local", "127.0.0.1", 1)
    environ = {"SLURM_JOB_ID": "7", "EVERSTEP_LAUNCH_ID": launch}
    return RankProcess(place, environ, 0, StopRequest())


def test_rank_0_records_an_attempt_from_bring_up_to_end(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "attempts.jsonl")
    AttemptLog(lines, process(0)).bring_up([])
    log = AttemptLog(lines, process(0))
    log.bring_up(["seed=1"])
    assert [record["event"] for record in log.earlier()] == ["bring_up"]
    log.start(1, from_step=40)
    log.step = 55
    log.end(requeue.SAVED, cause="SIGTERM")
    lines.close()
    _, bring_up, start, end = lines.read()
    assert bring_up["overrides"] == ["seed=1"]
    assert bring_up["slurm_job"] == "7"
    assert (start["attempt"], start["from_step"]) == (1, 40)
    assert (end["attempt"], end["from_step"], end["step"]) == (1, 40, 55)
    assert (end["exit_code"], end["cause"]) == (75, "SIGTERM")
    assert {bring_up["start_id"]} == {start["start_id"]} == {end["start_id"]}


@pytest.mark.parametrize("wanted", ["never", "global_step40"])
def test_what_a_launch_has_begun_is_continued_when_it_is_started_again(
    wanted: str, tmp_path: Path
) -> None:
    """A requeued job that was told to start anew must not do so again and again."""
    lines = JsonLines(tmp_path / "attempts.jsonl")
    first = AttemptLog(lines, process(0))
    first.bring_up([])
    died_before = AttemptLog(lines, process(0))
    assert died_before.resume_mode(wanted) == wanted
    first.start(0, from_step=0)
    again = AttemptLog(lines, process(0))
    assert again.resume_mode(wanted) == "auto"
    assert again.resume_mode("must") == "must"
    assert AttemptLog(lines, process(0, launch="two")).resume_mode(wanted) == wanted


def test_a_start_that_would_begin_anew_where_the_run_has_not_saved_is_refused(
    tmp_path: Path,
) -> None:
    """A checkpoint directory on a disk that is not mounted is an empty directory."""
    lines = JsonLines(tmp_path / "attempts.jsonl")
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    first = AttemptLog(lines, process(0))
    first.refuse_lost_checkpoints("auto", directory)
    first.bring_up([])
    killed_early = AttemptLog(lines, process(0))
    killed_early.refuse_lost_checkpoints("auto", directory)
    first.start(0, from_step=0)
    log = AttemptLog(lines, process(0, launch="two"))
    with pytest.raises(ConfigError, match=r"holds no attempt, but this run has made 1 before"):
        log.refuse_lost_checkpoints("auto", directory)
    log.refuse_lost_checkpoints("never", directory)
    Path(directory.attempts).mkdir(parents=True)
    log.refuse_lost_checkpoints("auto", directory)


def test_damaged_lines_of_attempts_do_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    half = '{"event": "end", "start_id": "b"}\n{"event": "start", "start_id": "b"}\n'
    path.write_bytes(b'\xff\x00{[\n7\n{}\n{"event": "end", "start_id": []}\n' + half.encode())
    log = AttemptLog(JsonLines(path), process(0))
    assert [record["event"] for record in log.earlier()] == ["end", "start"]
    check_progress(log.earlier(), 0, limit=3)
    assert log.resume_mode("never") == "never"
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):  # and not a run without attempts
        log.earlier()


def test_other_ranks_record_nothing(tmp_path: Path) -> None:
    log = AttemptLog(JsonLines(tmp_path / "attempts.jsonl"), process(1))
    log.bring_up([])
    log.start(1, from_step=0)
    log.end(0, cause="done")
    assert log.earlier() == []
    assert list(tmp_path.iterdir()) == []
