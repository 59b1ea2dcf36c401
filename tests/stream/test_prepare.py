"""Making token files: what they hold, that a kill leaves nothing half, that bytes do not vary."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.prepare import __main__ as command_line
from engine.prepare import inputs
from engine.prepare.encoders import Choice
from engine.prepare.errors import PrepareError, UsageError
from engine.prepare.inputs import FOLDER_SUFFIXES, Reading
from engine.prepare.part import Made
from engine.prepare.prepare import Job, Progress, prepare
from engine.stream import MegatronTokens
from engine.stream.byte_tokens import END_MARK, END_OF_DOCUMENT
from tests.terminal import terminal

REPOSITORY = Path(__file__).parents[2]
TEXTS = ["abc", "", "dé\n", "x" * 50, "the end"]


def job(*paths: Path, out: Path, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "tokenizer": "bytes",
        "end_of_document": None,
        "vocab_size": None,
        "replace_invalid": False,
        "field": "text",
        "text_lines": False,
        "part_bytes": 1 << 20,
        "processes": 1,
        **changes,
    }
    reading = Reading(settings["field"], settings["text_lines"], settings["replace_invalid"])
    choice = Choice(
        *(settings[key] for key in ("tokenizer", "end_of_document", "vocab_size")),
        settings["replace_invalid"],
    )
    return Job(
        tuple(map(str, paths)),
        FOLDER_SUFFIXES,
        out,
        reading,
        choice,
        settings["part_bytes"],
        settings["processes"],
    )


class Told:
    """What a job told about its progress."""

    def __init__(self, on_made: Callable[[], None] = lambda: None) -> None:
        self.begun: list[int] = []
        self.read = 0
        self.made: list[Made] = []
        self.on_made = on_made

    @property
    def progress(self) -> Progress:
        return Progress(begins=self.begun.append, reads=self._reads, made=self._made)

    def _reads(self, size: int) -> None:
        self.read += size

    def _made(self, made: Made, count: int) -> None:
        self.made.append(made)
        self.on_made()


def run(wanted: Job) -> dict[str, Any]:
    return prepare(wanted, Told().progress)


def write_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text, "n": 1}) + "\n" for text in texts))
    return path


def documents_of(folder: Path) -> list[list[int]]:
    """Return every document of a folder, as the data set reads it."""
    windows = MegatronTokens(folder, seq_len=1, component="made")
    found: list[list[int]] = []
    position = 0
    while position < windows.source.size:
        (piece,) = windows.source.pieces(position, position + 1)
        end = position + 1
        while end < windows.source.size and windows.source.pieces(end, end + 1)[0].begin:
            end += 1
        found.append(windows.source.read(position, end).tolist())
        assert piece.begin == 0
        position = end
    return found


def as_bytes(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), END_OF_DOCUMENT] for text in texts if text]


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_documents_of_text_and_json_lines_keep_their_boundaries(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    write_lines(folder / "c.jsonl", TEXTS)
    (folder / "b" / "one.txt").write_text("one\ntwo\n")
    (folder / "b" / "empty.txt").write_text("")
    (folder / "b" / ".hidden.txt").write_text("no")
    (folder / "b" / "other.pyc").write_text("no")
    (tmp_path / "first").write_text("named by hand")
    described = run(job(tmp_path / "first", folder, out=tmp_path / "out"))
    wanted = as_bytes(["named by hand", "one\ntwo\n", *TEXTS])
    assert documents_of(tmp_path / "out") == wanted
    assert described["documents"] == len(wanted)
    assert described["tokens"] == sum(map(len, wanted))
    assert described == json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert described["vocab_size"] == 257
    windows = MegatronTokens(tmp_path / "out", seq_len=8, component="x", vocab_size=257)
    assert windows.decode(windows.window(2)) == f"e\ntwo\n{END_MARK}ab"


def test_lines_of_text_can_be_documents(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"one\r\n\ntwo\nthree")
    run(job(tmp_path / "t.txt", out=tmp_path / "out", text_lines=True))
    assert documents_of(tmp_path / "out") == as_bytes(["one", "two", "three"])


def test_compressed_files_are_read(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"text"))
    run(job(tmp_path, out=tmp_path / "out"))
    assert documents_of(tmp_path / "out") == as_bytes([*TEXTS, *TEXTS, "text"])


@pytest.mark.parametrize("field", ["body", "größe"])
def test_another_field_can_be_taken(tmp_path: Path, field: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["\ufeffa", "\ud800b"], field)
    run(job(path, out=tmp_path / "out", field=field))
    assert documents_of(tmp_path / "out") == as_bytes(["\ufeffa", "?b"])


def test_every_line_is_in_exactly_one_span_whatever_the_spans(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    content = b'{"text": "a"}\n\n{"text": "bcd"}\r\n' + b'{"text": "%s"}\n' % (b"e" * 30)
    path.write_bytes(b"\xef\xbb\xbf" + content + b'{"text": "no end"}')
    reading = Reading("text", text_lines=False, replace_invalid=False)
    for size in range(1, len(content) + 30):
        spans = inputs.spans(inputs.describe(str(path)), reading, size)
        found = [one.content for span in spans for one in inputs.documents(span, reading)]
        assert found == ["a", "bcd", "e" * 30, "no end"]


def test_the_number_of_processes_does_not_change_a_byte(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS * 20)
    told = Told()
    prepare(job(path, out=tmp_path / "one", part_bytes=500), told.progress)
    assert len(told.made) > 5
    assert told.begun == [path.stat().st_size] == [told.read]
    run(job(path, out=tmp_path / "three", part_bytes=500, processes=3))
    assert content_of(tmp_path / "three") == content_of(tmp_path / "one")
    run(job(path, out=tmp_path / "whole"))
    assert documents_of(tmp_path / "whole") == documents_of(tmp_path / "one")


def test_what_an_interrupted_start_made_is_kept_and_the_rest_is_added(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS * 20)
    run(job(path, out=tmp_path / "whole", part_bytes=500))

    def interrupt() -> None:
        raise KeyboardInterrupt

    wanted = job(path, out=tmp_path / "out", part_bytes=500)
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted, Told(interrupt).progress)
    assert not wanted.out.exists()
    under_way = tmp_path / "out.partial" / "tokens"
    made = {path.stem for path in under_way.glob("*.idx")}
    assert made
    (under_way / ".part_00003.bin.77").write_bytes(b"torn")
    for path in sorted(under_way.glob("*.idx"))[1:]:
        path.unlink()
    told = Told()
    prepare(wanted, told.progress)
    assert min(part.number for part in told.made) == 1
    assert content_of(wanted.out) == content_of(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


KILLED = """
import multiprocessing, os, signal, sys
from tests.stream.test_prepare import Told, job, prepare
from pathlib import Path

def made():
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    signal.pause()

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    prepare(job(source, out=out, part_bytes=500, processes=2), Told(made).progress)
"""


def test_a_killed_start_leaves_nothing_half_and_no_process_and_is_continued(
    tmp_path: Path,
) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS * 20)
    run(job(path, out=tmp_path / "whole", part_bytes=500))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    process = subprocess.Popen(
        [sys.executable, script, path, tmp_path / "out"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    with process:
        assert process.stdout is not None
        workers = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
    assert workers
    for worker in workers:
        assert select.select([worker], [], [], 60)[0]
        os.close(worker)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out.partial" / "tokens").glob("*.idx"))
    run(job(path, out=tmp_path / "out", part_bytes=500, processes=2))
    assert content_of(tmp_path / "out") == content_of(tmp_path / "whole")


def test_a_full_disk_is_said_with_its_place_and_the_same_command_continues(tmp_path: Path) -> None:
    """A limit on the size of files is as good as a full disk: the write fails in its midst."""
    path = write_lines(tmp_path / "a.jsonl", ["x" * 1000] * 100)
    run(job(path, out=tmp_path / "whole"))
    out = tmp_path / "out"
    command = ["prepare", str(path), "--out", str(out), "--tokenizer", "bytes"]
    limit = 1 << 16
    done = subprocess.run(
        [sys.executable, "-m", "engine.prepare", *command, "--part-mebibytes", "1"],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"everstep-data: {out}: {os.strerror(errno.EFBIG)}; when that is put right, the same "
        "command continues\n"
    )
    assert not out.exists()
    (torn,) = (tmp_path / "out.partial" / "tokens").iterdir()
    takes_room: list[bool] = []
    progress = replace(Told().progress, begins=lambda _: takes_room.append(torn.exists()))
    prepare(job(path, out=out), progress)
    assert takes_room == [False]
    assert content_of(out) == content_of(tmp_path / "whole")


def test_a_complete_folder_is_left_alone_and_another_is_not_overwritten(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    described = run(job(path, out=tmp_path / "out"))
    (tmp_path / "out.partial").mkdir()  # as if it was killed right after its rename
    told = Told()
    assert prepare(job(path, out=tmp_path / "out"), told.progress) == described
    assert told.begun == []
    assert not (tmp_path / "out.partial").exists()
    for other in (job(path, path, out=tmp_path / "out"), job(path, out=tmp_path)):
        with pytest.raises(UsageError, match="is there already, and not what these inputs"):
            run(other)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A file of lines, some of which a start that failed has made into parts."""
    path = write_lines(tmp_path / "a.jsonl", TEXTS * 20)
    path.write_text(path.read_text() + "not json\n")
    with pytest.raises(PrepareError):
        run(job(path, out=tmp_path / "out", part_bytes=500))
    assert list((tmp_path / "out.partial" / "tokens").glob("*.idx"))
    return path


def test_a_start_with_other_arguments_does_not_continue(begun: Path) -> None:
    out = begun.parent / "out"
    for changes, told in (
        ({"part_bytes": 501}, "part_bytes differs"),
        ({"field": "n"}, "reading differs"),
        ({"tokenizer": "tokens", "vocab_size": 9}, "encoder differs"),
    ):
        with pytest.raises(UsageError, match=told):
            run(job(begun, out=out, **{"part_bytes": 500, **changes}))


def test_a_start_with_changed_inputs_does_not_continue(begun: Path) -> None:
    out = begun.parent / "out"
    with pytest.raises(UsageError, match=r"files differs \(a file is gone, or"):
        run(job(begun, begun, out=out, part_bytes=500))
    other = write_lines(begun.parent / "b.jsonl", TEXTS)
    with pytest.raises(UsageError, match=r"b\.jsonl is new"):
        run(job(begun, other, out=out, part_bytes=500))
    begun.write_text(begun.read_text().removesuffix("not json\n"))
    with pytest.raises(UsageError, match=r"a\.jsonl is changed"):
        run(job(begun, out=out, part_bytes=500))


def test_two_starts_at_once_are_refused(begun: Path) -> None:
    with open(begun.parent / "out.partial" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process is at work on it"):
            run(job(begun, out=begun.parent / "out", part_bytes=500))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"text": "a"', "line at byte 14: is not a line of JSON"),
        (b'{"text": "\xff"}', "line at byte 14: is not a line of JSON in UTF-8"),
        (b'{"body": "a", "n": 1}', r"byte 14: has no field 'text' \(it has body, n\); set --field"),
        (b'["a"]', r"byte 14: has no field 'text' \(it is no object\)"),
        (b'{"text": 1}', "byte 14: field 'text' holds int, wanted text, or a list of tokens"),
        (b'{"text": [1]}', "byte 14: holds tokens, not text"),
        (b"[" * 100000, "byte 14: is not a line of JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_line_that_cannot_be_used_is_named_by_its_place(
    tmp_path: Path, line: bytes, told: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with pytest.raises(PrepareError, match=rf"{tmp_path}/a\.jsonl, (line at )?{told}"):
        run(job(tmp_path / "a.jsonl", out=tmp_path / "out"))


def test_what_is_not_utf8_can_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\xff"}\n')
    run(job(tmp_path / "a.jsonl", out=tmp_path / "out", replace_invalid=True))
    assert documents_of(tmp_path / "out") == as_bytes(["a\ufffd"])


def test_a_torn_compressed_file_is_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "a.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b'{"text": "a"}\n')[:-9])
        with pytest.raises(PrepareError, match=f"{name}: cannot be read"):
            run(job(tmp_path / name, out=tmp_path / name[2:]))


def test_inputs_that_are_not_there_or_hold_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    for path, told in (
        (tmp_path / "none", "none: there is no such file or folder"),
        (tmp_path / "folder", r"folder: no file in this folder ends in \.txt or \.md"),
        (tmp_path / "empty.jsonl", "the inputs hold no documents"),
    ):
        with pytest.raises(UsageError, match=told):
            run(job(path, out=tmp_path / "out"))


def test_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    tokens = [[1, 2, 3], [65499], [5]]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in tokens))
    for vocab_size, dtype, end in ((65499 + 1, "int32", "7"), (70000, "int32", None)):
        out = tmp_path / str(vocab_size)
        changes = {"tokenizer": "tokens", "field": "input_ids", "vocab_size": vocab_size}
        assert run(job(path, out=out, end_of_document=end, **changes))["dtype"] == dtype
        assert documents_of(out) == [[*row, 7] if end else row for row in tokens]
    with pytest.raises(PrepareError, match="byte 25: found token 65499, wanted 0 to 65498"):
        run(job(path, out=tmp_path / "x", **{**changes, "vocab_size": 65499}))
    path.write_text('{"input_ids": [1, true]}')
    with pytest.raises(PrepareError, match="wanted a list of whole numbers"):
        run(job(path, out=tmp_path / "y", **changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 9}, "--vocab-size goes with --tokenizer tokens"),
        ({"end_of_document": "x"}, "--tokenizer bytes has its own end"),
        ({"tokenizer": "tokens"}, "needs --vocab-size"),
        ({"tokenizer": "tokens", "vocab_size": 9, "end_of_document": "x"}, "it is a number"),
        ({"tokenizer": "tokens", "vocab_size": 9, "end_of_document": "9"}, "is not below"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(UsageError, match=told):
        run(job(path, out=tmp_path / "out", **changes))


def test_the_command_says_what_it_made_and_how_to_train_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "out"
    call = ["prepare", str(path), "--out", str(out), "--tokenizer", "bytes"]
    assert command_line.main(call) == 0
    said = capsys.readouterr()
    assert f"{out}: 4 documents, 68 tokens of uint16, vocabulary 257" in said.out
    assert f"data.components.tokens.path={out} model.vocab_size=257" in said.out
    assert said.err == "part 1 of 1: 4 documents, 68 tokens\n"
    assert command_line.main([*call, "--field", "n"]) == command_line.EXIT_USAGE
    assert "is there already" in capsys.readouterr().err
    call[3] = str(tmp_path / "other")
    assert command_line.main([*call, "--field", "n"]) == command_line.EXIT_FAILED
    assert "field 'n' holds int" in capsys.readouterr().err


def test_a_terminal_gets_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setenv("TERM", "xterm")
    call = ["prepare", str(path), "--tokenizer", "bytes", "--out"]
    with terminal(80) as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        assert command_line.main([*call, str(tmp_path / "out")]) == 0
        assert screen.saw("read:   0%|")
        assert command_line.main([*call, str(tmp_path / "quiet"), "--quiet"]) == 0
        assert not screen.saw("%|")
        assert screen.lines() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
