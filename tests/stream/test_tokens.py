"""Token windows, token files, and the corpus every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch

from engine.stream import DocumentationText, LibrarySources, StreamError, TokenFile, TokenWindows
from engine.stream.byte_tokens import END_MARK, END_OF_DOCUMENT, VOCAB_SIZE
from engine.stream.corpus import ByteWindows, join_documents
from engine.stream.files.mapped import DIGEST_BLOCK_BYTES
from engine.stream.source import SAMPLED_RANGES, SAMPLED_TOKENS, Piece
from engine.stream.tokens import Windows


def write(path: Path, tokens: Any, dtype: str = "<u2") -> Path:
    np.asarray(tokens, dtype=dtype).tofile(path)
    return path


def open_file(path: Path, **settings: Any) -> TokenFile:
    return TokenFile(path, **{"seq_len": 4, "component": "web", **settings})


def whole(windows: Windows) -> Any:
    return windows.source.read(0, windows.source.size)


@pytest.mark.parametrize("count", [5, 8, 9, 10, 101])
def test_windows_overlap_by_one_and_predict_every_token_but_the_first_once(count: int) -> None:
    windows = TokenWindows(np.arange(count, dtype=np.uint16), seq_len=4, source="numbers")
    samples = [windows[index] for index in range(len(windows))]
    inputs = torch.cat([sample["input_ids"] for sample in samples])
    labels = torch.cat([sample["labels"] for sample in samples])
    assert inputs.dtype == labels.dtype == torch.int64
    whole = (count - 1) // 4 * 4
    assert inputs.tolist() == list(range(whole))
    assert labels.tolist() == list(range(1, whole + 1))


def test_a_window_that_is_not_there_is_refused() -> None:
    windows = TokenWindows(np.arange(9, dtype=np.uint16), seq_len=4, source="numbers")
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"no window {index}, it has 2"):
            windows[index]


def test_too_few_tokens_for_one_window_are_refused() -> None:
    with pytest.raises(StreamError, match=r"numbers: holds 4 tokens, .* seq_len \+ 1 = 5"):
        TokenWindows(np.arange(4, dtype=np.uint16), seq_len=4, source="numbers")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_file_reads_what_was_written(tmp_path: Path, dtype: str) -> None:
    largest = np.iinfo(dtype).max
    tokens = [0, 1, 256, largest, 7, 8, 9, 10, 11]
    windows = open_file(write(tmp_path / "t.bin", tokens, np.dtype(dtype).str), dtype=dtype)
    assert len(windows) == 2
    assert windows[0]["input_ids"].tolist() == tokens[:4]
    assert windows[1]["labels"].tolist() == tokens[5:]


def test_a_missing_file_names_component_and_path(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=rf"component 'web': {tmp_path}/none.bin: cannot be read"):
        open_file(tmp_path / "none.bin")


def test_a_file_that_ends_in_the_middle_of_a_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "torn.bin"
    path.write_bytes(bytes(101))
    with pytest.raises(StreamError, match=r"'web': .*torn\.bin: 101 bytes is not a whole number"):
        open_file(path)


@pytest.mark.parametrize("count", [0, 4])
def test_a_file_shorter_than_a_window_is_refused(tmp_path: Path, count: int) -> None:
    path = write(tmp_path / "short.bin", range(count))
    with pytest.raises(StreamError, match=rf"'web': .*short\.bin: holds {count} tokens"):
        open_file(path)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="dtype is 'int8', wanted one of uint16, uint32"):
        open_file(write(tmp_path / "t.bin", range(9)), dtype="int8")


def test_a_token_outside_the_vocabulary_is_refused_at_the_start(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", [*range(8), 300])
    with pytest.raises(StreamError) as caught:
        open_file(path, vocab_size=257)
    message = str(caught.value)
    assert f"component 'web': {path}: found token 300 at byte 16 of {path} (window 2)" in message
    assert "wanted 0 to 256; is uint16 what the file holds" in message


def test_a_token_outside_the_vocabulary_is_refused_where_it_is_read(tmp_path: Path) -> None:
    tokens = np.zeros(3 * SAMPLED_RANGES * SAMPLED_TOKENS, dtype=np.uint16)
    bad = 2 * SAMPLED_TOKENS  # the first range that is looked at is before it, the second behind
    tokens[bad] = 300
    windows = open_file(write(tmp_path / "t.bin", tokens), vocab_size=257)
    windows[0]
    with pytest.raises(StreamError, match=rf"token 300 at byte {2 * bad} of .*t\.bin"):
        windows[bad // 4]


def test_a_token_files_fingerprint_follows_its_content_and_not_its_path(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 16, 64 * DIGEST_BLOCK_BYTES)
    first = open_file(write(tmp_path / "a.bin", tokens)).fingerprint()
    assert open_file(write(tmp_path / "b.bin", tokens)).fingerprint() == first
    for position in (0, -1):
        changed = tokens.copy()
        changed[position] ^= 1
        other = open_file(write(tmp_path / "c.bin", changed)).fingerprint()
        assert other != first
        assert {**other, "digest_of_some_blocks": first["digest_of_some_blocks"]} == first
    assert open_file(write(tmp_path / "d.bin", tokens[:-1])).fingerprint() != first
    assert open_file(tmp_path / "a.bin", seq_len=5).fingerprint() != first
    assert open_file(tmp_path / "a.bin", dtype="uint32").fingerprint() != first


def test_documents_are_joined_by_the_end_of_document_token() -> None:
    end = END_OF_DOCUMENT
    assert join_documents([b"ab", b"", b"\xff"]).tolist() == [97, 98, end, end, 255, end]


def test_a_window_knows_its_documents_and_its_text() -> None:
    windows = ByteWindows([b"abc", b"", b"defgh"], ["x", "y", "z"], seq_len=4, source="letters")
    assert windows.pieces(0) == [Piece(None, "x", 0, 4), Piece(None, "y", 0, 1)]
    assert windows.pieces(1) == [Piece(None, "y", 0, 1), Piece(None, "z", 0, 4)]
    assert windows.decode(windows.window(1)) == f"{END_MARK}defg"
    assert windows.describe(1) == {
        "window": 1,
        "tokens": [4, 9],
        "pieces": [
            {"file": None, "document": "y", "begin": 0, "end": 1},
            {"file": None, "document": "z", "begin": 0, "end": 4},
        ],
    }


def test_the_documentation_is_every_topic_in_order_of_its_key() -> None:
    tokens = whole(DocumentationText(seq_len=64))
    ends = np.flatnonzero(tokens == END_OF_DOCUMENT)
    documents = np.split(tokens, ends + 1)[:-1]
    assert [bytes(d[:-1].astype(np.uint8)).decode() for d in documents] == [
        topics[key] for key in sorted(topics)
    ]


def test_the_library_sources_are_the_modules_in_order_of_their_paths_without_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (
        *("json/decoder.py", "json-old.py", "json/__init__.py", "abc.py"),
        *("test/a.py", "json/tests/a.py", "idlelib/a.py", "lib2to3/a.py", "site-packages/a.py"),
        *("__pycache__/a.py", "abc.txt"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    wanted = [b"abc.py", b"json/__init__.py", b"json/decoder.py", b"json-old.py"]
    assert whole(LibrarySources(seq_len=8)).tolist() == join_documents(wanted).tolist()


def test_the_library_sources_of_this_python_are_megabytes_of_two_byte_tokens() -> None:
    tokens = whole(LibrarySources(seq_len=64))
    assert tokens.dtype == np.uint16
    assert 5_000_000 < tokens.size < 40_000_000
    assert int(tokens.max()) == END_OF_DOCUMENT == VOCAB_SIZE - 1


def test_a_library_that_cannot_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(StreamError, match=f"cannot list {tmp_path}/none"):
        LibrarySources(seq_len=8)


def test_both_corpora_are_the_same_when_built_again() -> None:
    for corpus in (DocumentationText, LibrarySources):
        assert corpus(seq_len=32).fingerprint() == corpus(seq_len=32).fingerprint()
        assert corpus(seq_len=32).fingerprint() != corpus(seq_len=33).fingerprint()
