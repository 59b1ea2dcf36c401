"""Every kept step is shown once, whatever is killed, torn or damaged: through real files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.monitors import follower
from launcher.monitors.csv_files import CsvFiles
from launcher.monitors.follower import Follower
from launcher.monitors.point import Monitor, Point
from launcher.monitors.tensorboard import TensorBoard
from tests.monitors.curves import Curve, as_float32, csv_curves, tensorboard_curves

KINDS = (TensorBoard, CsvFiles)


class KilledError(Exception):
    """The attempt ends here, or the monitor is tried again."""


class Mortal:
    """A monitor that is killed before one of its calls, once: what is buffered is lost."""

    def __init__(self, monitor: Monitor, calls: int) -> None:
        self._monitor = monitor
        self._calls = calls
        self.name, self.directory = monitor.name, monitor.directory

    def __getattr__(self, name: str) -> Any:
        if self._calls == 0:
            sizes = {path: path.stat().st_size for path in self.directory.glob("*")}
            self._monitor.close()
            for path, size in sizes.items():
                with path.open("r+b") as file:
                    file.truncate(size)
            self._calls = -1
            raise KilledError
        self._calls -= 1
        return getattr(self._monitor, name)


@dataclass
class Run:
    """A run whose losses say which attempt made them."""

    directory: Path
    attempts: int = 0

    def __post_init__(self) -> None:
        self.metrics = self.directory / "metrics.jsonl"
        self.kept: Curve = []
        self._followers: list[Follower] = []

    def close(self) -> None:
        """Let go of the files of all followers."""
        for one in self._followers:
            one.give_up()

    def train(self, from_step: int, steps: int, *, attempt: int | None = None) -> None:
        """Record steps that count."""
        number = self.attempts if attempt is None else attempt
        self.kept = [point for point in self.kept if point[0] <= from_step]
        for step in range(from_step + 1, from_step + steps + 1):
            self.kept.append((step, step + number / 1000))
            self.record(line(step, number))

    def record(self, text: str) -> None:
        with self.metrics.open("a") as file:
            file.write(text)

    def follow(self, monitor: Any, step: int) -> Follower:
        """A follower of the attempt that begins now."""
        self.kept = [point for point in self.kept if point[0] <= step]
        one = Follower(monitor, self.metrics, tokens_per_step=64, attempt=self.attempts, step=step)
        self._followers.append(one)
        return one


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path)
    yield one
    one.close()


def line(step: int, attempt: int) -> str:
    record = {
        "time": "2026-01-01T00:00:00.000+00:00",
        "attempt": attempt,
        "step": step,
        "loss": step + attempt / 1000,
        "lr": 0.001,
        "grad_norm": None,
        "sample_offset": 8 * step,
        "step_seconds": 0.5,
    }
    return json.dumps(record) + "\n"


def shown(kind: type, directory: Path) -> Curve:
    """The loss, as it is shown."""
    curves = csv_curves(directory) if kind is CsvFiles else tensorboard_curves(directory)
    assert len({tuple(step for step, _ in curve) for curve in curves.values()}) <= 1
    assert "train/grad_norm" not in curves
    assert all(value == 128 for _, value in curves.get("train/tokens_per_second", ()))
    return curves.get("train/loss", [])


def assert_shows_what_is_kept(kind: type, run: Run) -> None:
    rounded = as_float32 if kind is TensorBoard else float
    assert shown(kind, run.directory / "shown") == [(s, rounded(loss)) for s, loss in run.kept]


def catch_up(one: Follower) -> None:
    while one.catch_up():
        pass


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_curve_has_every_kept_step_once_whatever_was_killed(kind: Any, data: Any) -> None:
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower, "_SLICE_BYTES", data.draw(st.sampled_from([64, 700, 16384])))
        run = Run(Path(name))
        for _ in range(data.draw(st.integers(1, 5), label="attempts")):
            last = run.kept[-1][0] if run.kept else 0
            step = data.draw(st.integers(0, last), label="begins at")
            calls = data.draw(st.none() | st.integers(0, 40), label="calls until it is killed")
            monitor: Any = kind(run.directory / "shown")
            one = run.follow(monitor if calls is None else Mortal(monitor, calls), step)
            dies = data.draw(st.booleans(), label="the attempt dies with it")
            for steps in data.draw(st.lists(st.integers(0, 7), max_size=3), label="steps"):
                run.train(step, steps)
                step += steps
                try:
                    catch_up(one)
                except KilledError:
                    if dies:
                        run.record(data.draw(st.sampled_from(["", "\n", '{"time": "20\n'])))
                        break
                    one.give_up()
                    catch_up(one)
            else:
                one.give_up()
            run.attempts += 1
        last_one = run.follow(kind(run.directory / "shown"), run.kept[-1][0] if run.kept else 0)
        catch_up(last_one)
        last_one.give_up()
        assert_shows_what_is_kept(kind, run)
        run.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_back_goes_at_once_and_not_with_the_first_step_after(
    run: Run, tmp_path: Path, kind: Any
) -> None:
    one = run.follow(kind(tmp_path / "shown"), 0)
    run.train(0, 9)
    catch_up(one)
    run.attempts = 1
    rolled_back = run.follow(kind(tmp_path / "shown"), 4)
    one.give_up()
    catch_up(rolled_back)
    assert_shows_what_is_kept(kind, run)
    run.train(4, 2)
    catch_up(rolled_back)
    assert_shows_what_is_kept(kind, run)


@pytest.mark.parametrize("kind", KINDS)
def test_lines_of_an_attempt_that_was_taken_over_are_not_shown(
    run: Run, tmp_path: Path, kind: Any
) -> None:
    run.train(0, 5)
    run.attempts = 1
    one = run.follow(kind(tmp_path / "shown"), 3)
    run.train(3, 1)
    run.record(line(5, 0) + line(6, 0) + line(7, 0))
    catch_up(one)
    assert_shows_what_is_kept(kind, run)
    run.train(4, 1)
    catch_up(one)
    assert_shows_what_is_kept(kind, run)


class Forward(CsvFiles):
    """Cannot go back."""

    def go_back(self, step: int) -> None: ...


def test_what_is_taken_back_already_is_not_even_written(run: Run, tmp_path: Path) -> None:
    """For a service keeps what it is told of a step."""
    run.train(0, 5)
    one = run.follow(Forward(tmp_path / "shown"), 3)
    catch_up(one)
    assert_shows_what_is_kept(CsvFiles, run)


@pytest.mark.parametrize(
    "kept", ["", "ste", "step,loss\n", "step,loss\n1,0.5\n", "step,loss\n1,0.5\n1"]
)
def test_rows_go_on_after_the_last_whole_one(tmp_path: Path, kept: str) -> None:
    (tmp_path / "train_loss.csv").write_text(kept)
    monitor = CsvFiles(tmp_path)
    monitor.open()
    monitor.go_back(9)
    monitor.write(Point(10, 0.0, {"train/loss": 0.25}))
    monitor.close()
    first = [(1, 0.5)] if "1,0.5\n" in kept else []
    assert csv_curves(tmp_path) == {"train/loss": [*first, (10, 0.25)]}


@pytest.mark.parametrize(
    "damage",
    [
        "\x00\xff\n",
        "[" * 100_000 + "\n",
        '{"step": 4}\n',
        line(4, 0).replace('"step": 4', '"step": true'),
        line(4, 0).replace('"step": 4', f'"step": {1 << 63}'),
        line(4, 0).replace('"step": 4', '"step": -4'),
        line(4, 0).replace("2026-01-01", "yesterday"),
        line(4, 0).replace('"loss": 4.0', '"loss": 1' + "0" * 400),
        "1\n",
        "x" * 70_000 + "\n",
    ],
    ids=range(10),
)
def test_damaged_lines_are_passed_over_with_one_warning(
    run: Run, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = run.follow(CsvFiles(tmp_path / "shown"), 0)
    run.train(0, 3)
    run.record(damage + damage)
    run.train(3, 3)
    catch_up(one)
    assert_shows_what_is_kept(CsvFiles, run)
    assert [record.getMessage() for record in caplog.records] == [
        f"csv_monitor: {run.metrics} has damaged lines, which are not shown"
    ]


def test_a_line_that_is_being_written_waits_for_its_end(run: Run, tmp_path: Path) -> None:
    one = run.follow(CsvFiles(tmp_path / "shown"), 0)
    catch_up(one)
    whole = line(1, 0)
    run.record(whole[:30])
    catch_up(one)
    assert shown(CsvFiles, tmp_path / "shown") == []
    run.record(whole[30:])
    catch_up(one)
    assert shown(CsvFiles, tmp_path / "shown") == [(1, 1.0)]


@pytest.mark.parametrize("mark", ["", "[]", "{}", '{"offset": -1, "step": 3}', '{"offset": 1e400}'])
@pytest.mark.parametrize("kind", KINDS)
def test_without_its_mark_a_monitor_is_shown_everything_anew(
    run: Run, tmp_path: Path, kind: Any, mark: str
) -> None:
    one = run.follow(kind(tmp_path / "shown"), 0)
    run.train(0, 5)
    catch_up(one)
    one.give_up()
    (tmp_path / "shown" / "shown.json").write_text(mark)
    again = run.follow(kind(tmp_path / "shown"), 5)
    catch_up(again)
    again.give_up()
    assert_shows_what_is_kept(kind, run)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shorter_record_than_was_shown_goes_on_at_its_end(
    run: Run, tmp_path: Path, kind: Any
) -> None:
    one = run.follow(kind(tmp_path / "shown"), 0)
    run.train(0, 5)
    catch_up(one)
    run.metrics.unlink()
    again = run.follow(kind(tmp_path / "shown"), 5)
    run.train(5, 2)
    catch_up(again)
    again.give_up()
    assert_shows_what_is_kept(kind, run)


def test_tensorboard_files_are_read_in_the_order_of_attempts_whatever_the_clock_says(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now, begins in ((2e9, 0), (1e9, 4), (1.5e9, 2)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        one = run.follow(TensorBoard(tmp_path / "shown"), begins)
        run.train(begins, 6)
        catch_up(one)
        one.give_up()
        run.attempts += 1
    assert len(list((tmp_path / "shown").glob("events*"))) == 3
    assert_shows_what_is_kept(TensorBoard, run)


def test_losses_that_are_no_numbers_are_shown_as_such(tmp_path: Path) -> None:
    monitor = TensorBoard(tmp_path)
    monitor.open()
    values: Sequence[float] = (float("inf"), 1e300, -1e300, 5e-324)
    for step, value in enumerate(values, start=1):
        monitor.write(Point(step, 1.0, {"train/loss": value}))
    monitor.write(Point(5, 1.0, {"train/loss": float("nan")}))
    monitor.close()
    (*numbers, last) = tensorboard_curves(tmp_path)["train/loss"]
    assert numbers == [(1, float("inf")), (2, float("inf")), (3, float("-inf")), (4, 0.0)]
    assert last[0] == 5
    assert last[1] != last[1]
