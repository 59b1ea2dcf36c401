"""Arrow and Parquet files of tokens, in the layout of Hugging Face's data sets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.stream import Component, HuggingFaceTokens, ParquetTokens, Stream, StreamError
from engine.stream.source import Piece
from engine.stream.tokens import Windows
from tests.stream.reading import indices, loader_of
from tests.stream.token_files import flat

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra: pip install 'everstep[hf]'")
from pyarrow import ipc, parquet  # noqa: E402

ROWS = [[1, 2, 3], [4], [100, 101, 102, 103, 104, 105, 106, 107, 108], [7, 8]]
SETTINGS: dict[str, Any] = {"seq_len": 4, "component": "web"}


def save_to_disk(folder: Path, parts: Iterable[list[Any]], kind: Any, *, rows: int = 2) -> Path:
    """Write Arrow streams, `rows` in a record batch, and their state.json."""
    folder.mkdir()
    names = []
    for number, part in enumerate(parts):
        names.append(f"data-{number:05}.arrow")
        table = pyarrow.table({"text": ["x"] * len(part), "input_ids": pyarrow.array(part, kind)})
        with ipc.new_stream(folder / names[-1], table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def write_parquet(path: Path, rows: list[Any], kind: Any, *, group: int = 2) -> Path:
    table = pyarrow.table({"input_ids": pyarrow.array(rows, kind), "text": ["x"] * len(rows)})
    parquet.write_table(table, path, row_group_size=group)
    return path


def assert_reads(windows: Windows, tokens: list[int]) -> None:
    assert len(windows) == (len(tokens) - 1) // windows.seq_len
    for index in range(len(windows)):
        begin = index * windows.seq_len
        assert windows.window(index).tolist() == tokens[begin : begin + windows.seq_len + 1]


def refused(build: Callable[[], object], *parts: object) -> None:
    with pytest.raises(StreamError) as caught:
        build()
    for part in ("component 'web'", *map(str, parts)):
        assert part in str(caught.value)


LISTS = [
    pyarrow.list_(pyarrow.int32()),
    pyarrow.list_(pyarrow.uint16()),
    pyarrow.large_list(pyarrow.int64()),
]


@pytest.mark.parametrize("kind", LISTS, ids=str)
def test_a_saved_data_set_is_read_over_files_and_record_batches(tmp_path: Path, kind: Any) -> None:
    rows = [ROWS[0], None, [], *ROWS[1:]]
    folder = save_to_disk(tmp_path / "d", [rows, ROWS], kind)
    windows = HuggingFaceTokens(folder, **SETTINGS, vocab_size=109)
    assert_reads(windows, flat(ROWS + ROWS))
    file = str(folder / "data-00000.arrow")
    assert windows.pieces(0) == [
        Piece(file, 0, 0, 3),
        Piece(file, 3, 0, 1),
        Piece(file, 4, 0, 1),
    ]
    assert windows.source.place(14) == f"row 5 of {file}"
    ended = HuggingFaceTokens(folder, **SETTINGS, end_of_document=9)
    assert_reads(ended, flat([[*(row or []), 9] for row in rows + ROWS]))


def test_rows_of_one_fixed_length_are_read(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    kind = pyarrow.list_(pyarrow.int32(), 3)
    assert_reads(
        HuggingFaceTokens(save_to_disk(tmp_path / "d", [rows], kind), **SETTINGS), flat(rows)
    )
    path = write_parquet(tmp_path / "t.parquet", rows, kind)
    assert_reads(ParquetTokens(path, **SETTINGS), flat(rows))


def test_another_column_is_another_fingerprint(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    table = pyarrow.table({"a": ROWS, "b": ROWS})
    with ipc.new_stream(folder / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    prints = [HuggingFaceTokens(folder, **SETTINGS, column=name).fingerprint() for name in "ab"]
    assert prints[0] != prints[1]


@pytest.mark.parametrize(
    ("rows", "kind", "told"),
    [
        ([[0.5] * 9], pyarrow.list_(pyarrow.float32()), "wanted lists of integers"),
        (["text"] * 9, pyarrow.string(), "Text becomes tokens by everstep-data prepare"),
        ([1] * 9, pyarrow.int32(), "holds int32, wanted lists of integers"),
        ([[1, None, 2, 3, 4, 5]], pyarrow.list_(pyarrow.int32()), "1 nulls among tokens"),
    ],
)
def test_a_column_that_holds_no_tokens_is_refused(
    tmp_path: Path, rows: list[Any], kind: Any, told: str
) -> None:
    folder = save_to_disk(tmp_path / "d", [rows], kind)
    refused(lambda: HuggingFaceTokens(folder, **SETTINGS), "column 'input_ids'", told)
    path = write_parquet(tmp_path / "t.parquet", rows, kind)
    if "nulls" not in told:
        refused(lambda: ParquetTokens(path, **SETTINGS), path, told)
    else:
        refused(lambda: ParquetTokens(path, **SETTINGS).window(0), path, told)


def test_a_token_outside_the_vocabulary_names_its_row(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "d", [ROWS], LISTS[0])
    build = lambda: HuggingFaceTokens(folder, **SETTINGS, vocab_size=108)  # noqa: E731
    refused(build, "found token 108 at row 2 of", "data-00000.arrow (window 3), wanted 0 to 107")


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "d", [ROWS], LISTS[0])
    build = lambda: HuggingFaceTokens(folder, **SETTINGS, column="ids")  # noqa: E731
    refused(build, "has no column 'ids'; it has text, input_ids")


def test_a_dictionary_of_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, [ROWS], LISTS[0])
    (tmp_path / "dataset_dict.json").write_text("{}")
    refused(lambda: HuggingFaceTokens(tmp_path, **SETTINGS), "holds the splits test, train")


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("{", "is not what save_to_disk writes"),
        ("[]", "is not what save_to_disk writes"),
        ('{"_data_files": [{"filename": "../data-00000.arrow"}]}', "has a folder in it"),
        ('{"_data_files": []}', "holds no data files"),
        (
            '{"_data_files": [{"filename": "a"}], "_indices_data_files": [{"filename": "b"}]}',
            "flatten_indices()",
        ),
        ('{"_data_files": [{"filename": "none.arrow"}]}', "none.arrow: cannot be read"),
    ],
)
def test_a_state_that_cannot_be_right_is_refused(tmp_path: Path, state: str, told: str) -> None:
    folder = save_to_disk(tmp_path / "d", [ROWS], LISTS[0])
    (folder / "state.json").write_text(state)
    refused(lambda: HuggingFaceTokens(folder, **SETTINGS), folder, told)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_torn_arrow_or_parquet_file_is_refused(tmp_path: Path, kept: int) -> None:
    folder = save_to_disk(tmp_path / "d", [ROWS], LISTS[0])
    path = write_parquet(tmp_path / "t.parquet", ROWS, LISTS[0])
    for file in (folder / "data-00000.arrow", path):
        file.write_bytes(file.read_bytes()[: kept * file.stat().st_size // 3])
    refused(lambda: HuggingFaceTokens(folder, **SETTINGS), "data-00000.arrow")
    refused(lambda: ParquetTokens(path, **SETTINGS), path, "is torn, or not Parquet")


def test_offsets_that_point_outside_are_refused(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "d", [ROWS], LISTS[0], rows=4)
    file = folder / "data-00000.arrow"
    content, offsets = file.read_bytes(), bytes.fromhex("00000000 03000000 04000000 0d000000")
    assert content.count(offsets) == 1
    file.write_bytes(content.replace(offsets, offsets[:12] + bytes.fromhex("0d000070")))
    refused(lambda: HuggingFaceTokens(folder, **SETTINGS), file)


@pytest.mark.parametrize("kind", LISTS, ids=str)
def test_parquet_files_are_read_over_row_groups(tmp_path: Path, kind: Any) -> None:
    write_parquet(tmp_path / "b.parquet", ROWS, kind)
    write_parquet(tmp_path / "a.parquet", ROWS[::-1], kind, group=3)
    windows = ParquetTokens(tmp_path, **SETTINGS, vocab_size=109)
    assert_reads(windows, flat(ROWS[::-1] + ROWS))
    first, second = (str(tmp_path / name) for name in ("a.parquet", "b.parquet"))
    assert windows.pieces(3) == [
        Piece(first, 3, 0, 3),
        Piece(second, 0, 0, 2),
    ]
    assert windows.source.place(12) == f"row 3 of {first}"
    ended = ParquetTokens(tmp_path, **SETTINGS, end_of_document=9)
    assert_reads(ended, flat([[*row, 9] for row in ROWS[::-1] + ROWS]))


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_loaders_worker_reads_what_its_parent_has_read_from(tmp_path: Path, kind: str) -> None:
    """A worker is a fork of a process that has open files and, of pyarrow, threads."""
    windows: Windows
    if kind == "arrow":
        folder = save_to_disk(tmp_path / "d", [ROWS * 3], LISTS[0])
        windows = HuggingFaceTokens(folder, **SETTINGS)
    else:
        path = write_parquet(tmp_path / "t.parquet", ROWS * 3, LISTS[0])
        pyarrow.parquet.read_table(path)  # by pyarrow's threads
        windows = ParquetTokens(path, **SETTINGS)
    whole = [windows.window(index).tolist() for index in range(len(windows))]
    stream = Stream([Component("web", windows)], seed=0)
    with closing(loader_of(stream, workers=1)) as loader:
        for begin in range(0, len(windows) - 1, 2):
            batch = next(loader)
            wanted = [whole[index] for index in indices(stream, begin, begin + 2)]
            assert batch["input_ids"].tolist() == [window[:-1] for window in wanted]
            assert batch["labels"].tolist() == [window[1:] for window in wanted]


def test_parquet_with_empty_rows_is_refused_where_it_is_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", [*ROWS, [], [9] * 9, [5], [6]], LISTS[0])
    windows = ParquetTokens(path, **SETTINGS)
    assert windows.window(0).tolist() == [1, 2, 3, 4, 100]
    refused(lambda: windows.window(len(windows) - 2), path, "row group 2 has 9 tokens where")


def test_without_pyarrow_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_to_disk(tmp_path / "d", [ROWS], LISTS[0])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for build, path in ((HuggingFaceTokens, folder), (ParquetTokens, folder / "state.json")):
        refused(lambda b=build, p=path: b(p, **SETTINGS), "pip install 'everstep[hf]'")
