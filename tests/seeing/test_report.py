"""`everstep report`: the page in a real browser, on records whose every second is known."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.format import names
from launcher import tools
from launcher.seeing import report, report_page, report_tables, report_words
from launcher.seeing.report_limits import Limits, LimitsError, read_limits
from launcher.seeing.report_series import Span, loss_series, sample, save_series, thin
from launcher.seeing.summary import summarize
from tests.format import build
from tests.scripts import run_script
from tests.seeing import browser
from tests.seeing.run_records import BEGINNING, Writer, known_run, unend

NOW = BEGINNING.timestamp() + 1000
BENCHMARK = {
    "ranks": 2,
    "bytes_per_rank": 400_000_000,
    "figures": {"machine": {"warm copy": [0.1, 0.2, 0.4], "raw write": [0.5, 1.0, 0.8]}},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The known run, complete, with its last checkpoint, and with what goes wrong in others."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    writer = known_run(tmp_path / "exp1")
    writer.event(1, 551, "persisted", step=30, tag="global_step30", seconds=4.0, bytes=2_000)
    writer.event(0, 140, "abandoned", step=12, tag="global_step12", reason="no space")
    writer.event(1, 450, "alarm", step=20, kind="spike", loss="9.0")
    (writer.path / "config.yaml").write_text("train: {steps: 60}\n")
    build.checkpoint(
        writer.path / "checkpoints", build.draft(2, "a0002.s0001.global_step60.5ca1ab1e")
    )
    return writer.path


def written(run: Path, *options: str) -> str:
    """Run the command on a run, and return its page."""
    assert tools.run(["report", str(run), *options]) == 0
    return (run / "report" / report.PAGE_NAME).read_text(encoding="utf-8")


def test_the_page_in_a_browser(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Light and wide, dark and narrow: the figures are seen, and nobody complains."""
    limits = run / "saving.json"
    limits.write_text(json.dumps(BENCHMARK))
    page = written(run, "--limits", str(limits))
    assert capsys.readouterr().out.startswith(f"{run}/report/index.html: ")
    wide = browser.look(run / "report" / "index.html", width=1280)
    narrow = browser.look(run / "report" / "index.html", width=400, dark=True)
    for found in (wide, narrow):
        assert found["console"] == []
        assert set(found["figures"]) == {"loss", "saves", "time"}
        assert len(found["shapes"]) == 3, "of each figure, the drawing for this width only"
        assert min(found["shapes"]) > 5
        assert found["overflow"] <= 0
        assert found["labels"][0].startswith("Loss from 10 to 0.1667 over 480 samples")
    assert (wide["width"], narrow["width"]) == (1280, 400)
    assert all(width > 900 for width in wide["figures"].values())
    assert all(330 < width <= 400 for width in narrow["figures"].values())
    assert (wide["page"], narrow["page"]) == ("rgb(255, 255, 255)", "rgb(20, 23, 27)")
    assert wide["ink"] != narrow["ink"]
    # Nothing is asked of a network, and nothing runs.
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="(?!#|data:)', page) == []
    assert re.findall(r"url\((?!#)|@import", page) == []
    for name in ("loss", "saves", "time"):
        assert (run / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_browser_tells_of_errors(run: Path) -> None:
    """What the test above looks for would be found."""
    path = run / "bad.html"
    path.write_text("<html><body><script>nothing.here()</script><figure></figure>")
    found = browser.look(path, width=500)
    assert "nothing is not defined" in found["console"][0]
    assert found["figures"] == {}


def test_what_a_person_reads(run: Path) -> None:
    page = browser.text_of(
        report_page.page(summarize(run, NOW), loss_series(summarize(run, NOW)), {}, None)
    )
    assert page.startswith(
        "exp1: complete exp1 complete Step 60 of 60 Loss 0.1667 at step 60 "
        "Goodput 60.0% of 16 min 40 s Attempts 3 1 broke off; 4 steps lost "
        "Checkpoints 1 newest: step 60, "
    )
    assert (
        "kept 600.0 60.0% steps that the run's state descends from "
        "lost 40.0 4.0% steps that a later attempt took back "
        "starting 85.0 8.5% processes, imports, the model "
    ) in page
    assert "down 178.0 17.8% between attempts" in page
    assert (
        "0 killed, or its host was lost 0 14 2 min 42 s 2026-01-31 12:00:00 16 node7 "
        "1 stopped: SIGUSR2 10 30 4 min 20 s 2026-01-31 12:05:00 16 node7 "
        "2 done 30 60 6 min 40 s 2026-01-31 12:10:00 16 node7 "
    ) in page
    assert "All records could be read." in page


def test_the_loss_over_samples(run: Path) -> None:
    """Eight samples a step; steps 11 to 14 of the first attempt came to nothing."""
    found = loss_series(summarize(run, NOW))
    assert found.over == "samples"
    assert found.kept == [(8.0 * step, 10 / step) for step in range(1, 61)]
    assert found.lost == [[(8.0 * step, 10 / step) for step in range(11, 15)]]
    assert found.spans == [
        Span(0, 0.0, 112.0, True),
        Span(1, 80.0, 240.0, False),
        Span(2, 240.0, 480.0, False),
    ]
    assert (found.stored, found.gone) == ([480.0], [240.0])
    assert (found.failed_saves, found.alarms) == ([96.0], [160.0])
    assert found.non_finite == []


def test_what_the_saves_took(run: Path) -> None:
    found = save_series(summarize(run, NOW))
    assert found.pause == [(10, 2.0), (30, 3.0), (60, 4.0)]
    assert found.write == [(30, 4.0)]
    assert found.commit == [(30, 7.0), (60, 16.0)]
    assert found.write_speed == [(30, 2_000 / 4.0 / 1e9)]
    assert found.pause_speed[0] == (10, 100 / 2.0 / 1e9)
    assert found.medians == {"pause": 3.0, "write": 4.0, "until committed": 11.5}
    assert report_words.save_words(found, Limits(2, 2.0, 0.5)) == (
        "Rank 0's saves, on logarithmic axes; medians: pause 3 s, write 4 s, until committed 11.5 "
        "s. Dashed: what the benchmark's machine can do, 2 ranks at once, for each of them: "
        "2.00 GB/s from memory to memory, 0.50 GB/s to disk."
    )


def test_a_million_steps_are_thinned_and_no_spike_is_lost() -> None:
    points = [(float(step), 2.0) for step in range(1_000_000)]
    points[123_456] = (123_456.0, 77.0)
    points[777_777] = (777_777.0, 0.1)
    found = thin(points)
    assert len(found) <= 1300
    assert {points[0], points[123_456], points[777_777], points[-1]} <= set(found)
    assert found == sorted(found)


def test_many_saves_are_sampled_and_the_worst_are_kept() -> None:
    points = [(float(step), 1.0 + step % 7) for step in range(30_000)]
    points[12_345] = (12_345.0, 99.0)
    points[23_456] = (23_456.0, 0.1)
    slowest, least = sample(points, worst=max), sample(points, worst=min)
    assert max(len(slowest), len(least)) <= 400
    assert points[12_345] in slowest
    assert points[23_456] in least
    assert {value for _, value in slowest} >= set(range(1, 8)), "the ordinary ones are there, too"


def test_a_loss_that_is_not_finite_is_marked_and_not_drawn(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 0.2,', '"loss": NaN,'))
    found = loss_series(summarize(run, NOW))
    assert found.non_finite == [400.0]
    assert [x for x, _ in found.kept] == [8.0 * step for step in range(1, 61) if step != 50]


def test_without_samples_the_loss_is_over_steps(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("sample_offset", "samples_of_another_version"))
    found = loss_series(summarize(run, NOW))
    assert (found.over, found.kept[-1], found.gone) == ("step", (60.0, 10 / 60), [30.0])


def test_what_a_record_says_is_text_and_no_markup(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    writer = Writer(tmp_path / "<b>run")
    writer.bring_up(0, 0, host=evil, world_size=evil, overrides=[evil])
    writer.start(0, 1, from_step=0)
    writer.steps(0, 1, range(1, 3), 1)
    writer.end(0, 5, 1, evil)
    page = written(writer.path)
    assert "<script" not in page
    assert "<b>" not in page
    assert page.count("&lt;script&gt;alert") == 4


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        ("attempts.jsonl", "gone"),
        ("metrics.jsonl", "garbled"),
        ("events.jsonl", "gone"),
        ("config.yaml", "garbled"),
    ],
)
def test_what_is_damaged_is_a_note_and_never_a_traceback(run: Path, lost: str, how: str) -> None:
    (run / lost).unlink()
    if how == "garbled":
        (run / lost).write_bytes(b"\xff\x00{[\n" * 5)
    (run / "checkpoints" / "global_step60" / names.MANIFEST_NAME).write_bytes(b"{}")
    page = browser.text_of(written(run))
    assert f"Notes {lost}" in page
    assert "Checkpoints 0, and 1 damaged none that can be read" in page


def test_numbers_that_cannot_be_are_not_drawn(run: Path) -> None:
    """Newer, or damaged so that it is JSON still."""
    lines = [
        {"step": 10**30, "loss": 1.0, "step_seconds": 1.0},
        {"step": 62, "loss": 10**400, "step_seconds": 1.0},
        {"step": 63, "loss": 1e308, "step_seconds": 1e308, "sample_offset": -1e308},
        {"step": 64, "loss": 1, "step_seconds": float("nan"), "sample_offset": "many"},
        {"step": -5, "loss": -1.5, "step_seconds": -7.0, "sample_offset": None},
    ]
    with (run / "metrics.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps({"attempt": 2, "time": "9999-12-31T23:59:59", **line}) + "\n")
    events = [
        {"event": "staged", "step": "x", "seconds": "y", "bytes": []},
        {"event": "staged", "step": 61, "seconds": 10**400, "bytes": 1},
        {"event": "persisted", "step": 61, "seconds": -1, "bytes": float("inf")},
        {"event": "committed", "step": None, "seconds": 1e-320, "time": 7},
    ]
    with (run / "events.jsonl").open("a") as file:
        for line in events:
            file.write(json.dumps({"attempt": 2, **line}) + "\n")
    page = browser.text_of(written(run))
    assert "metrics.jsonl: 2 damaged or unknown lines were passed over" in page
    assert "events.jsonl: 1 damaged or unknown lines were passed over" in page


_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.sampled_from(["2026-01-31T12:00:00+00:00", "0001-01-01T00:00:00", "9999-12-31T23:59:59"]),
)
_KEYS = (
    *("attempt", "step", "loss", "step_seconds", "sample_offset", "seconds", "bytes", "time"),
    *("from_step", "exit_code", "cause", "overrides", "host", "world_size", "started_by"),
)


def _records(event: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    fixed = {"event": event, "start_id": st.sampled_from(["a", "b"])}
    plausible = {"attempt": st.integers(0, 2), "step": st.integers(-1, 9), "loss": st.floats()}
    record = st.fixed_dictionaries(
        {**fixed, **plausible, "step_seconds": st.floats()},
        optional={key: _ODD for key in _KEYS if key not in (*plausible, "step_seconds")},
    )
    return st.lists(record, max_size=8)


@settings(deadline=None)
@given(
    attempts=_records(st.sampled_from(["bring_up", "start", "end"])),
    others=_records(st.sampled_from(["staged", "persisted", "committed", "failed", "alarm"])),
)
def test_whatever_the_records_hold_something_is_shown(
    tmp_path_factory: pytest.TempPathFactory,
    attempts: list[dict[str, Any]],
    others: list[dict[str, Any]],
) -> None:
    path = tmp_path_factory.mktemp("run")
    for name, lines in (("attempts", attempts), ("metrics", others), ("events", others)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = summarize(path, NOW)
    loss, saves = loss_series(found), save_series(found)
    report_words.save_words(saves, None)
    report_words.loss_words(found, loss)
    report_words.time_words(found)
    report_page.page(found, loss, {}, None)


def test_overrides_are_told_where_they_change(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for number, rate in enumerate(("0.1", "0.1", "0.2", "0.1")):
        writer.bring_up(number, number, overrides=["run.name=exp1", f"optimizer.lr={rate}"])
    page = browser.text_of(report_tables.attempts(summarize(tmp_path, NOW)))
    told = re.findall(r"as before|run\.name=exp1 optimizer\.lr=\S+", page)
    assert told == [
        "run.name=exp1 optimizer.lr=0.1",
        "as before",
        "run.name=exp1 optimizer.lr=0.2",
        "run.name=exp1 optimizer.lr=0.1",
    ]


def test_a_run_that_lives_is_shown_as_such(run: Path) -> None:
    unend(run)
    found = summarize(run, NOW)
    life = replace(found.life, state="running", words="running on node7, last beat 2 s ago")
    page = browser.text_of(report_tables.attempts(replace(found, life=life)))
    assert page.count("not yet") == 1
    assert "2 not yet 30 60" in page


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "attempts.jsonl").touch()
    page = browser.text_of(written(tmp_path))
    assert page.count("Nothing of it is on record.") == 3
    assert "No attempt is on record." in page


def test_limits_are_the_medians_of_the_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "saving.json"
    path.write_text(json.dumps(BENCHMARK))
    assert read_limits(path) == Limits(ranks=2, copy=2.0, write=0.5)
    for text in ("", "[]", "{}", '{"bytes_per_rank": 1, "figures": {"machine": {}}}'):
        path.write_text(text)
        with pytest.raises(LimitsError, match=r"Wanted what `python -m tests.benchmarks.saving"):
            read_limits(path)


def test_what_cannot_be_put_there_leaves_nothing_behind(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "report" / "loss.png").mkdir(parents=True)
    assert report.main([str(run)]) == report.EXIT_USAGE
    assert "cannot be written: Is a directory" in capsys.readouterr().err
    assert os.listdir(run / "report") == ["loss.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}/nothing"], "cannot be listed"),
        (["{run}/.."], "a report is about one run; there are: exp1, exp2"),
        (["{run}", "--limits", "{run}/nothing.json"], "No such file"),
        (["{run}", "--out", "{run}/config.yaml"], "--out {run}/config.yaml: cannot be written"),
    ],
)
def test_bad_input_is_explained(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Writer(run.with_name("exp2")).bring_up(0, 0)
    assert report.main([one.format(run=run) for one in arguments]) == report.EXIT_USAGE
    error = capsys.readouterr().err
    assert message.format(run=run) in error
    assert error.count("\n") == 1


def test_without_matplotlib_the_extra_is_named(run: Path) -> None:
    script = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from launcher.__main__ import main\nsys.argv = ['everstep', 'report', sys.argv[1]]\n"
        "code = main()\nheavy = {'torch', 'deepspeed', 'hydra'} & set(sys.modules)\n"
        "sys.exit(f'{heavy}' if heavy else code)"
    )
    done = run_script(script, run)
    assert done.returncode == report.EXIT_USAGE
    assert done.stderr == (
        "everstep: the report is drawn with matplotlib, which is not installed: "
        "pip install 'everstep[report]'\n"
    )
