"""`status`, `report` and `diff` on what is damaged in every way: a note, and no traceback."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.__main__ import EXIT_DAMAGED, EXIT_USAGE
from engine.format import names
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.owner import RUNNING, Beat, Owner
from launcher import tools
from launcher.seeing import report_page, report_words
from launcher.seeing.report_series import loss_series, save_series
from launcher.seeing.summary import summarize
from tests.exchange.test_compare import pair
from tests.format import build
from tests.seeing.run_records import BEGINNING, Writer, known_run

NOW = BEGINNING.timestamp() + 1000
RECORDS = ("attempts.jsonl", "metrics.jsonl", "events.jsonl")
TAG = "global_step60"
MANIFEST = f"checkpoints/{TAG}/{names.MANIFEST_NAME}"
OWNER = "checkpoints/.attempts/0003/owner.json"
FILES = (*RECORDS, "config.yaml", MANIFEST, OWNER)

NASTY = (
    *(b"\x00", b"\xff\xfe", b"\n", b"\r\n", b"\xe2\x80\xa8", b"{", b"}", b'"', b",", b"[" * 2_000),
    *(b"NaN", b"-Infinity", b"1e999", b"1e308", b"-1", b"0", b"null", b"true", b"[]", b"{}"),
    *(b"9" * 19, b"9" * 30, b"9" * 5_000, b'"\\ud800"', b'"\x1b[2J"', b'"\\u001b[2J"'),
    *(
        b'{"attempt": [], "event": {}}\n',
        b'{"attempt": 9, "step": 1}\n',
        b"!!python/name:os.system",
    ),
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The known run, with a fourth attempt that lives, and its checkpoint."""
    run = known_run(tmp_path_factory.mktemp("original") / "run")
    run.bring_up(3, 1010, overrides=["train.steps=100", "run.name=run"])
    run.event(3, 1020, "resumed", step=60, tag=TAG, seconds=1.0, bytes=100)
    run.start(3, 1020, from_step=60)
    run.steps(3, 1020, range(61, 64), 10)
    (run.path / "config.yaml").write_text("train: {steps: 60}\ncheckpoint: {keep_last: 2}\n")
    checkpoints = run.path / "checkpoints"
    build.checkpoint(checkpoints, build.draft(2, f"a0002.s0001.{TAG}.5ca1ab1e"))
    (checkpoints / "latest").write_text(TAG)
    attempt = CheckpointDirectory(str(checkpoints)).attempt(3)
    os.makedirs(attempt.save("global_step70.s0001"))
    owner = Owner.this_process(2, {})
    Path(attempt.owner).write_bytes(owner.to_bytes())
    Path(attempt.path, Beat(1, RUNNING, owner.pid, owner.start_ticks, "here").name()).touch()
    return run.path


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(original, tmp_path / "run")


def shown(run: Path) -> str:
    """Run the command as a person does, where a terminal takes UTF-8; return what it says."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) as stream:
        assert tools.run(["status", str(run)]) == 0
        stream.flush()
        return stream.buffer.getvalue().decode()


def for_programs(run: Path) -> dict[str, Any]:
    """Run the command with `--json`; what it prints is JSON by the letter."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert tools.run(["status", "--json", str(run)]) == 0
    (found,) = json.loads(stream.getvalue(), parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def page(run: Path) -> str:
    """Return a report's page, with everything but the drawings."""
    found = summarize(run, NOW)
    loss, saves = loss_series(found), save_series(found)
    words = [report_words.loss_words(found, loss), report_words.save_words(saves, None)]
    words.append(report_words.time_words(found))
    return report_page.page(found, loss, {}, None) + "\n".join(words)


def look(run: Path) -> list[str]:
    """Look at a run in every way, and return its notes."""
    text, notes = shown(run), for_programs(run)["notes"]
    assert text.startswith("run ")
    assert all(character.isprintable() or character == "\n" for character in text)
    for note in notes:
        assert f"note: {note}\n" in text
    page(run)
    return list(notes)


def test_nothing_is_wrong_with_the_run_before_it_is_damaged(original: Path) -> None:
    assert look(original) == []
    text = shown(original)
    assert f"running on this host, process {os.getpid()}" in text
    assert "step 63 of 100" in text
    assert "global_step70 is being saved: 0 of 2 shards" in text


def flip(data: bytes, at: int, _: bytes) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def put(data: bytes, at: int, what: bytes) -> bytes:
    return data[:at] + what + data[at:]


def replace_value(data: bytes, at: int, what: bytes) -> bytes:
    """Put something in the place of a value of a record."""
    begin = data.find(b": ", at) + 2
    ends = [end for end in (data.find(b", ", begin), data.find(b"}", begin)) if end > 0]
    return data[:begin] + what + data[min(ends, default=len(data)) :]


def cut(data: bytes, at: int, _: bytes) -> bytes:
    return data[:at]


def take_out(data: bytes, at: int, what: bytes) -> bytes:
    return data[:at] + data[at + len(what) :]


def repeat(data: bytes, at: int, _: bytes) -> bytes:
    return data[: at * 2] + data[at:]


def shuffle(data: bytes, at: int, _: bytes) -> bytes:
    """Interleave the lines from a place on with those before it."""
    lines = data.splitlines(keepends=True)
    middle = at * len(lines) // len(data)
    first, second = lines[:middle], lines[middle:]
    pairs = itertools.zip_longest(first, second, fillvalue=b"")
    return b"".join(itertools.chain.from_iterable(pairs))


Damage = Callable[[bytes, int, bytes], bytes]
DAMAGES: tuple[Damage, ...] = (flip, put, replace_value, cut, take_out, repeat, shuffle)
damages = st.lists(
    st.tuples(
        st.sampled_from(FILES),
        st.sampled_from(DAMAGES),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(NASTY),
    ),
    min_size=1,
    max_size=6,
)


@contextlib.contextmanager
def damaged(run: Path, plan: list[tuple[str, Damage, float, bytes]]) -> Iterator[None]:
    """Damage files of a run for a while."""
    before = {name: (run / name).read_bytes() for name, *_ in plan}
    try:
        for name, damage, place, what in plan:
            data = (run / name).read_bytes()
            if data:
                (run / name).write_bytes(damage(data, int(place * len(data)), what))
        yield
    finally:
        for name, data in before.items():
            (run / name).write_bytes(data)


def is_bad(line: bytes) -> bool:
    """Whether a line is no JSON object, by another reader than the one under test."""
    try:
        return not isinstance(json.loads(line.decode(errors="replace")), dict)
    except (ValueError, RecursionError):
        return line.endswith(b"\n")


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=damages)
def test_whatever_is_damaged_the_rest_is_shown_with_a_note(
    run: Path, plan: list[tuple[str, Damage, float, bytes]]
) -> None:
    with damaged(run, plan):
        notes = look(run)
        for name in RECORDS:
            with (run / name).open("rb") as file:
                if any(is_bad(line) for line in file):
                    assert any(note.startswith(f"{name}: ") for note in notes), name


def gone(path: Path) -> None:
    path.unlink()


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 40)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [gone, directory, broken_link, garbage, empty])
@pytest.mark.parametrize("name", [*FILES, "checkpoints/latest"])
def test_a_file_that_is_none(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(run / name)
    notes = look(run)
    if name in RECORDS or name == "config.yaml":
        is_fine = damage is empty and name in RECORDS[1:]
        assert {note.partition(":")[0].split()[0] for note in notes} == (
            set() if is_fine else {name}
        )
    elif name == MANIFEST:
        (line,) = (line for line in shown(run).splitlines() if line.startswith(TAG))
        assert line.split()[1:] == ["?"] * 6 + ["damaged"]
    elif name == OWNER:
        assert "run run: cannot be told: " in shown(run)


def test_a_directory_that_is_none(run: Path) -> None:
    for name in ("checkpoints/.attempts/0003", "checkpoints/.attempts", "checkpoints"):
        shutil.rmtree(run / name)
        (run / name).write_text("no directory")
        look(run)
    assert "no checkpoint is committed" in shown(run)


def test_names_that_nobody_wrote(run: Path) -> None:
    attempts = run / "checkpoints" / ".attempts"
    for name in ("\u00b2", "beat.0", "99999999999999999999", "0003/beat.x", "0003/open/\udcff"):
        (attempts / name).mkdir()
        look(run)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 500,
        "- a list",
        "train: {steps: 2001-99-99}",
        f"train: {{steps: {'9' * 5_000}}}",
        "train: {steps: !!int many}",
        "? [x]\n: y",
        "\x00",
    ],
)
def test_a_configuration_that_is_none(run: Path, text: str) -> None:
    (run / "config.yaml").write_text(text)
    assert look(run) == ["config.yaml is damaged"]


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("train: {steps: true}", []),
        ("train: [60]\ncheckpoint: 7", []),
        ("a: &a [*a]", []),
        ("checkpoint: {dir: /no/where}", ["/no/where: No such file or directory"]),
        ('checkpoint: {dir: "\\0"}', ["config.yaml: checkpoint.dir is no path that can be"]),
        ('checkpoint: {dir: "\\ud800"}', ["config.yaml: checkpoint.dir is no path that can be"]),
    ],
)
def test_a_configuration_without_what_is_looked_for(run: Path, text: str, notes: list[str]) -> None:
    (run / "config.yaml").write_text(text)
    shutil.rmtree(run / "checkpoints")
    assert look(run) == notes


@pytest.mark.parametrize("steps", ["\u00b2", "9" * 30, "9" * 5_000, "-5", "1e3", "\ud800", ""])
def test_a_number_of_steps_that_is_none_is_not_taken(run: Path, steps: str) -> None:
    Writer(run).bring_up(4, 1100, overrides=[f"train.steps={steps}", None, ["train.steps=5"], "="])
    look(run)
    assert for_programs(run)["total_steps"] in (100, None)


def test_a_name_that_is_no_text(run: Path) -> None:
    renamed = run.with_name(os.fsdecode(b"run\xff\x1b[2J"))
    os.rename(run, renamed)
    assert shown(renamed).startswith("run run\ufffd\ufffd[2J: running")
    for name in (MANIFEST, OWNER):  # what is wrong with them is said with their paths
        garbage(renamed / name)
    look(renamed)
    page(renamed).encode()
    assert tools.run(["status", "x" * 300]) == tools.run(["report", "x" * 300]) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e308, -1.0, 0])
def test_a_run_that_lives_has_made_steps_of_nonsense(run: Path, value: float) -> None:
    for step in range(64, 90):
        fields = {"loss": value, "step_seconds": value, "sample_offset": value}
        Writer(run).line("metrics", 1060, attempt=3, step=step, **fields)
    assert look(run) == []
    assert "step 89 of 100" in shown(run)
    assert for_programs(run)["loss"] == (value if math.isfinite(value) else None)


def test_a_report_of_nonsense_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two attempts that write at once, a clock that goes back, and losses that are none."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    run = Writer(tmp_path / "run")
    losses = (float("nan"), float("inf"), 1e308, -1e308, 1e-320, 0, -float("inf"), 2)
    for number in (0, 1):
        run.bring_up(number, 10 * number, host="\ud800", overrides=["\ud800", 7])
        run.start(number, 10 * number + 5, from_step=0)
    for row, loss in enumerate(losses * 3):
        fields = {"step": row // 2 + 1, "loss": loss, "step_seconds": loss, "sample_offset": loss}
        run.line("metrics", 500 - 20 * row, attempt=row % 2, **fields)
        run.event(row % 2, 20 * row, "staged", step=row, seconds=loss, bytes=loss)
        run.event(row % 2, 20 * row, "committed", step=loss, seconds=row, bytes=row)
    run.end(1, 3, 1, "RuntimeError: \ud800\x1b[2J\n  at once", step=loss)
    assert tools.run(["report", str(run.path)]) == 0
    written = (run.path / "report" / "index.html").read_bytes().decode()
    assert "failed (1): RuntimeError: \ufffd\ufffd[2J at once" in written
    assert written.count("<figure") == 3
    look(run.path)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{run.path}/report/index.html: ")


TAGS = ("global_step400", "global_step500")
RECEIPT = f"{TAGS[1]}/{names.receipt_name(1, 3)}"
PARTS = (
    RECEIPT,
    f"{TAGS[1]}/{names.MANIFEST_NAME}",
    f"{TAGS[1]}/{names.shard_name(0, 3)}",
    f"{TAGS[1]}/{names.shard_name(2, 3)}",
)


@pytest.fixture(scope="module")
def two_tags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair(tmp_path_factory.mktemp("two") / "checkpoints")


@settings(deadline=None, max_examples=60)
@given(
    part=st.sampled_from(PARTS),
    damage=st.sampled_from(DAMAGES),
    place=st.floats(0, 1, exclude_max=True),
    what=st.sampled_from(NASTY),
)
def test_whatever_is_damaged_diff_names_it(
    two_tags: Path, part: str, damage: Damage, place: float, what: bytes
) -> None:
    """A receipt counts for nothing once its save is committed; all other bytes do."""
    before = (two_tags / part).read_bytes()
    with damaged(two_tags, [(part, damage, place, what)]):
        counts = (two_tags / part).read_bytes() != before and part != RECEIPT
        for verify in ("full", "size"):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = tools.run(["diff", str(two_tags), *TAGS, "--verify", verify])
            assert code in (0, EXIT_DAMAGED, EXIT_USAGE)
            if counts and verify == "full":
                assert code == EXIT_DAMAGED
                assert part in said.getvalue()
