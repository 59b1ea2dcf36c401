"""Token files of other projects: read as they are meant, refused where they cannot be right."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.stream import (
    DatatroveTokens,
    LlmcTokens,
    MegatronTokens,
    StreamError,
    TokenFile,
)
from engine.stream.files import mapped, megatron
from engine.stream.source import Piece
from engine.stream.tokens import Windows
from tests.stream.token_files import (
    flat,
    megatron_index,
    write_datatrove,
    write_llmc,
    write_megatron,
)

# One is empty, one is longer than several windows.
DOCUMENTS = [[1, 2, 3], [], [4], [100, 101, 102, 103, 104, 105, 106, 107, 108], [7, 8]]
TOKENS = flat(DOCUMENTS)
SETTINGS: dict[str, Any] = {"seq_len": 4, "component": "web"}


def tokens_of(windows: Windows) -> list[int]:
    """Return what the windows hold, joined where they overlap."""
    parts = [windows.window(index).tolist() for index in range(len(windows))]
    for before, after in itertools.pairwise(parts):
        assert before[-1] == after[0]
    return [*(token for part in parts for token in part[:-1]), parts[-1][-1]]


def assert_reads(windows: Windows, tokens: list[int]) -> None:
    whole = (len(tokens) - 1) // windows.seq_len * windows.seq_len + 1
    assert tokens_of(windows) == tokens[:whole]


def refused(build: Callable[[], object], *parts: object) -> None:
    """Assert that a data set is refused, with a message that has all the parts, and the name."""
    with pytest.raises(StreamError) as caught:
        build()
    for part in ("component 'web'", *map(str, parts)):
        assert part in str(caught.value)


# Megatron


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_megatron_pairs_are_read_by_either_name(tmp_path: Path, dtype: str, suffix: str) -> None:
    path = write_megatron(tmp_path, DOCUMENTS, dtype=dtype)
    assert_reads(MegatronTokens(path.with_suffix(suffix), **SETTINGS, vocab_size=109), TOKENS)


@pytest.mark.parametrize(("code", "dtype"), [(6, "uint16"), (8, "uint64"), (8, "uint16")])
def test_codes_that_projects_differ_on_are_settled_by_the_size_of_the_tokens(
    tmp_path: Path, code: int, dtype: str
) -> None:
    path = write_megatron(tmp_path, DOCUMENTS, dtype=dtype, code=code)
    windows = MegatronTokens(path, **SETTINGS)
    assert_reads(windows, TOKENS)
    assert windows.source.dtype.name == dtype


@pytest.mark.parametrize("dtype", ["uint32", "float32"])
def test_a_code_that_means_floats_or_integers_of_one_size_must_be_settled_by_hand(
    tmp_path: Path, dtype: str
) -> None:
    path = write_megatron(tmp_path, DOCUMENTS, dtype=dtype, code=7)
    refused(lambda: MegatronTokens(path, **SETTINGS), path, "float32 or uint32", "dtype=uint32")
    windows = MegatronTokens(path, **SETTINGS, dtype="uint32")
    assert windows.window(0).tolist() == np.asarray(TOKENS[:5], dtype).view("u4").tolist()


@pytest.mark.parametrize(("code", "dtype"), [(6, "float64"), (6, "float32"), (7, "float64")])
def test_floats_are_refused(tmp_path: Path, code: int, dtype: str) -> None:
    path = write_megatron(tmp_path, DOCUMENTS, dtype=dtype, code=code)
    refused(lambda: MegatronTokens(path, **SETTINGS), path, f"mean {dtype}", "are integers")


def test_an_index_that_says_the_wrong_dtype_is_overridden(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, DOCUMENTS, dtype="uint32", code=4)
    assert_reads(MegatronTokens(path, **SETTINGS, dtype="uint32"), TOKENS)
    refused(lambda: MegatronTokens(path, **SETTINGS, dtype="uint16"), path, "30 (uint16) bytes")
    refused(lambda: MegatronTokens(path, **SETTINGS, dtype="float32"), "wanted one of uint8")


def test_sequences_are_grouped_into_documents_as_the_index_says(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, DOCUMENTS, indices=[0, 3, 5])
    pieces = MegatronTokens(path, **SETTINGS).pieces(0)
    file = str(path.with_suffix(".bin"))
    assert pieces == [Piece(file, 0, 0, 4), Piece(file, 1, 0, 1)]


def test_a_folder_of_pairs_is_one_sequence_and_windows_run_across_files(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    second = write_megatron(tmp_path / "part", DOCUMENTS[::-1], name="0")
    first = write_megatron(tmp_path, DOCUMENTS, name="b")
    write_megatron(tmp_path, [[5] * 9], name=".under_way")
    windows = MegatronTokens(tmp_path, **SETTINGS)
    assert_reads(windows, TOKENS + flat(DOCUMENTS[::-1]))
    files = [str(path.with_suffix(".bin")) for path in (first, second)]
    assert windows.pieces(3) == [
        Piece(files[0], 3, 8, 9),
        Piece(files[0], 4, 0, 2),
        Piece(files[1], 0, 0, 2),
    ]
    assert windows.source.place(15) == f"byte 0 of {files[1]}"


def test_files_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path, DOCUMENTS, name="a")
    write_megatron(tmp_path, DOCUMENTS, name="b", dtype="int32")
    refused(lambda: MegatronTokens(tmp_path, **SETTINGS), "a.bin holds uint16", "b.bin int32")


def test_a_folder_without_such_files_is_refused(tmp_path: Path) -> None:
    refused(lambda: MegatronTokens(tmp_path, **SETTINGS), tmp_path, "ends in .idx")


@pytest.mark.parametrize("seq_len", [1, 2, 4, 7])
def test_a_token_is_put_after_each_document_of_files_that_have_none(
    tmp_path: Path, seq_len: int
) -> None:
    path = write_megatron(tmp_path, DOCUMENTS)
    settings = {**SETTINGS, "seq_len": seq_len, "end_of_document": 50}
    windows = MegatronTokens(path, **settings)
    ended = [[*document, 50] for document in DOCUMENTS]
    assert_reads(windows, flat(ended))
    for index in range(len(windows)):
        by_piece = [
            token
            for piece in windows.pieces(index)
            for token in ended[int(piece.document or 0)][piece.begin : piece.end]
        ]
        assert by_piece == windows.window(index).tolist()
    assert windows.source.place(3) == f"the end of document 0 of {path.with_suffix('.bin')}"
    assert windows.source.place(7) == f"byte 8 of {path.with_suffix('.bin')}"
    assert windows.fingerprint() != MegatronTokens(path, **SETTINGS).fingerprint()


def test_a_token_to_put_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, DOCUMENTS, dtype="uint8")
    build = lambda: MegatronTokens(path, **SETTINGS, end_of_document=256)  # noqa: E731
    refused(build, "end_of_document=256: wanted 0 to 255")


@pytest.mark.parametrize("cut", ["bin", "idx"])
@pytest.mark.parametrize("by", [1, 2, 8])
def test_a_truncated_file_of_a_pair_is_refused(tmp_path: Path, cut: str, by: int) -> None:
    path = write_megatron(tmp_path, DOCUMENTS)
    torn = path.with_suffix(f".{cut}")
    torn.write_bytes(torn.read_bytes()[:-by])
    refused(lambda: MegatronTokens(path, **SETTINGS), torn, "torn")


@pytest.mark.parametrize("cut", ["bin", "idx"])
def test_a_missing_file_of_a_pair_is_named(tmp_path: Path, cut: str) -> None:
    path = write_megatron(tmp_path, DOCUMENTS)
    path.with_suffix(f".{cut}").unlink()
    refused(lambda: MegatronTokens(path, **SETTINGS), f"m.{cut}: cannot be read")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"magic": b"MMIDIDX\x00\x01"}, "is not a Megatron index"),
        ({"version": 2}, "has version 2, wanted 1"),
        ({"code": 9}, "dtype code 9 is unknown"),
        (
            {"lengths": [3, 0, 1, 9, 3]},
            "add up to 16 tokens, which is 32 (uint16) or 128 (uint64) bytes",
        ),
        ({"lengths": [3, 1, 0, 9, 2]}, "sequence 1, at byte 6 with 1 tokens, does not end"),
        ({"lengths": [3, -1, 2, 9, 2]}, "sequence 1 has length -1"),
        ({"indices": [1, 2, 3, 4, 5]}, "run from 1 to 5, wanted 0 to 5"),
        ({"indices": [0, 3, 2, 5]}, "document indices are not in order"),
        ({"indices": []}, "has no document indices"),
        ({"modes": bytes([0, 0, 1, 0, 0])}, "is of a multimodal data set"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    path = write_megatron(tmp_path, DOCUMENTS, **change)
    refused(lambda: MegatronTokens(path, **SETTINGS), path, told)


def test_modes_that_are_all_text_are_no_hindrance(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, DOCUMENTS, modes=bytes(len(DOCUMENTS)))
    assert_reads(MegatronTokens(path, **SETTINGS), TOKENS)


@pytest.mark.parametrize("at", [18, 26])
def test_a_count_of_two_to_the_63_costs_nothing_and_is_refused(tmp_path: Path, at: int) -> None:
    path = write_megatron(tmp_path, DOCUMENTS)
    head = bytearray(path.read_bytes())
    head[at : at + 8] = struct.pack("<Q", 1 << 63)
    path.write_bytes(head)
    refused(lambda: MegatronTokens(path, **SETTINGS), path, "the file is torn")


def test_a_large_index_is_checked_in_blocks_at_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "_CHECKED_BLOCKS", 2)
    monkeypatch.setattr(megatron, "_CHECKED_BLOCK", 2)
    documents = [[1, 2]] * 20
    assert_reads(MegatronTokens(write_megatron(tmp_path, documents), **SETTINGS), flat(documents))
    for wrong in (0, 19):
        lengths = [2] * 20
        lengths[wrong], lengths[10] = 1, 3
        path = write_megatron(tmp_path, documents, lengths=lengths)
        refused(lambda path=path: MegatronTokens(path, **SETTINGS), f"sequence {wrong}, ")


def test_a_token_below_zero_is_refused_at_the_start(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, [[1, 2, -3, 4, 5]], dtype="int32")
    where = f"found token -3 at byte 8 of {path.with_suffix('.bin')}"
    refused(lambda: MegatronTokens(path, **SETTINGS), where, "wanted 0 or above")


def test_the_fingerprint_follows_where_documents_end(tmp_path: Path) -> None:
    first = MegatronTokens(write_megatron(tmp_path, DOCUMENTS), **SETTINGS).fingerprint()
    assert MegatronTokens(tmp_path / "m.bin", **SETTINGS).fingerprint() == first
    again = write_megatron(tmp_path, [DOCUMENTS[0] + DOCUMENTS[2], *DOCUMENTS[3:]], name="n")
    assert MegatronTokens(again, **SETTINGS).fingerprint() != first


@pytest.fixture
def never_trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "SECONDS_BETWEEN_LOOKS", 0.0)


@pytest.mark.usefixtures("never_trusting")
@pytest.mark.parametrize("change", ["cut", "written"])
def test_a_file_that_is_changed_while_it_is_in_use_is_refused(tmp_path: Path, change: str) -> None:
    path = write_megatron(tmp_path, DOCUMENTS).with_suffix(".bin")
    windows = MegatronTokens(path, **SETTINGS)
    windows.window(0)
    before = path.stat()
    if change == "cut":
        os.truncate(path, 4)
    else:
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(0, before.st_mtime_ns + 1))
    refused(lambda: windows.window(0), path, "was changed while it was in use")


@pytest.mark.usefixtures("never_trusting")
def test_a_file_that_is_replaced_while_it_is_in_use_does_no_harm(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, DOCUMENTS).with_suffix(".bin")
    windows = MegatronTokens(path, **SETTINGS)
    (tmp_path / "new").write_bytes(bytes(4))
    (tmp_path / "new").rename(path)
    assert_reads(windows, TOKENS)
    path.unlink()
    assert_reads(windows, TOKENS)


# datatrove


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_datatrove_files_are_read_with_their_documents(tmp_path: Path, item_bytes: int) -> None:
    path = write_datatrove(tmp_path, DOCUMENTS, item_bytes=item_bytes)
    windows = DatatroveTokens(path, **SETTINGS, vocab_size=109)
    assert_reads(windows, TOKENS)
    assert windows.pieces(0) == [
        Piece(str(path), 0, 0, 3),
        Piece(str(path), 2, 0, 1),
        Piece(str(path), 3, 0, 1),
    ]
    ended = DatatroveTokens(path, **SETTINGS, end_of_document=9)
    assert_reads(ended, flat([[*document, 9] for document in DOCUMENTS]))


def test_datatrove_files_without_metadata_need_a_dtype(tmp_path: Path) -> None:
    path = write_datatrove(tmp_path, DOCUMENTS, item_bytes=4)
    (tmp_path / "d.ds.metadata").unlink()
    refused(lambda: DatatroveTokens(path, **SETTINGS), path, "set dtype to uint16 or uint32")
    assert_reads(DatatroveTokens(path, **SETTINGS, dtype="uint32"), TOKENS)
    refused(lambda: DatatroveTokens(path, **SETTINGS, dtype="int8"), "'int8', wanted uint16")


def test_datatrove_files_without_an_index_have_no_documents(tmp_path: Path) -> None:
    path = write_datatrove(tmp_path, DOCUMENTS)
    (tmp_path / "d.ds.index").unlink()
    windows = DatatroveTokens(path, **SETTINGS)
    assert_reads(windows, TOKENS)
    assert windows.pieces(1) == [Piece(str(path), None, 4, 9)]
    build = lambda: DatatroveTokens(path, **SETTINGS, end_of_document=1)  # noqa: E731
    refused(build, path, "does not say where its documents end")


@pytest.mark.parametrize(
    ("suffix", "content", "told"),
    [
        ("", bytes(29), "has 29 bytes, wanted 15 tokens of 2 bytes"),
        ("", bytes(28), "has 28 bytes, wanted 15 tokens of 2 bytes"),
        (".index", np.asarray([3, 3, 4, 13, 14], "<u8").tobytes(), "ends at token 14, but"),
        (".index", np.asarray([3, 13, 4, 13, 15], "<u8").tobytes(), "not in order"),
        (".index", np.asarray([3, 1 << 63], "<u8").tobytes(), f"ends at token {1 << 63}, but"),
        (".index", bytes(7), "7 bytes is not a whole number of document ends"),
        (".index", b"", "ends at token 0, but"),
        (".metadata", b"gpt2\n15", "wanted 'tokenizer|2' or '|4' on the first line"),
        (".metadata", b"gpt2|3\n15", "found 'gpt2|3\\n15'"),
        (".metadata", b"\xff" * 100, "wanted 'tokenizer|2'"),
    ],
)
def test_datatrove_files_that_do_not_agree_are_refused(
    tmp_path: Path, suffix: str, content: bytes, told: str
) -> None:
    path = write_datatrove(tmp_path, DOCUMENTS)
    changed = path.with_name(path.name + suffix)
    changed.write_bytes(content)
    refused(lambda: DatatroveTokens(path, **SETTINGS), changed, told)


# llm.c


@pytest.mark.parametrize(("magic", "item_bytes"), [(20240520, 2), (20240801, 4)])
def test_llmc_files_of_both_magic_numbers_are_read(
    tmp_path: Path, magic: int, item_bytes: int
) -> None:
    path = write_llmc(tmp_path / "t.bin", TOKENS, magic=magic, item_bytes=item_bytes)
    windows = LlmcTokens(path, **SETTINGS, vocab_size=109)
    assert_reads(windows, TOKENS)
    assert windows.source.place(2) == f"byte {1024 + 2 * item_bytes} of {path}"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"magic": 20240521}, "begins with magic number 20240521, version 1"),
        ({"version": 2}, "version 2; llm.c's are 20240520 and 20240801, version 1"),
        ({"item_bytes": 4}, "says 15 tokens of 2 bytes, but 60 bytes follow it"),
    ],
)
def test_llmc_headers_that_cannot_be_right_are_refused(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    settings = {"magic": 20240520, "item_bytes": 2, **change}
    path = write_llmc(tmp_path / "t.bin", TOKENS, **settings)
    refused(lambda: LlmcTokens(path, **SETTINGS), path, told)


@pytest.mark.parametrize("size", [0, 1023, 1024 + 29])
def test_torn_llmc_files_are_refused(tmp_path: Path, size: int) -> None:
    path = write_llmc(tmp_path / "t.bin", TOKENS, magic=20240520, item_bytes=2)
    path.write_bytes(path.read_bytes()[:size])
    refused(lambda: LlmcTokens(path, **SETTINGS), path, f"{size if size < 1024 else 29} bytes")


def test_a_negative_llmc_count_is_refused(tmp_path: Path) -> None:
    path = write_llmc(tmp_path / "t.bin", TOKENS, magic=20240520, item_bytes=2)
    content = bytearray(path.read_bytes())
    content[8:12] = struct.pack("<i", -1)
    path.write_bytes(content)
    refused(lambda: LlmcTokens(path, **SETTINGS), path, "says -1 tokens")


# numpy, and what only has its name


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64"])
def test_numpy_files_say_their_own_dtype(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "t.npy", np.asarray(TOKENS, dtype))
    assert_reads(TokenFile(tmp_path / "t.npy", **SETTINGS, dtype="uint16"), TOKENS)


def test_headerless_files_may_be_called_npy(tmp_path: Path) -> None:
    np.asarray(TOKENS, "<u4").tofile(tmp_path / "t.npy")
    assert_reads(TokenFile(tmp_path / "t.npy", **SETTINGS, dtype="uint32"), TOKENS)


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.zeros(9, "<f4"), "an array of float32 with shape (9,), wanted one dimension"),
        (np.zeros((3, 3), "<u2"), "an array of uint16 with shape (3, 3), wanted one dimension"),
    ],
)
def test_numpy_files_of_floats_or_matrices_are_refused(
    tmp_path: Path, array: Any, told: str
) -> None:
    np.save(tmp_path / "t.npy", array)
    refused(lambda: TokenFile(tmp_path / "t.npy", **SETTINGS), tmp_path / "t.npy", told)


@pytest.mark.parametrize("shape", ["(9223372036854775808,)", "(-1,)", "(16,)", "(14,)"])
def test_numpy_files_that_say_another_length_are_refused(tmp_path: Path, shape: str) -> None:
    head = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + bytes(30)
    (tmp_path / "t.npy").write_bytes(content)
    refused(
        lambda: TokenFile(tmp_path / "t.npy", **SETTINGS),
        f"says {shape.strip('(),')} tokens of 2 bytes, but 30 bytes follow",
    )


@pytest.mark.parametrize(
    "content", [b"\x93NUMPY\x03\x00", b"\x93NUMPY\x01\x00\xff\xff{", b"\x93NUMPY\x01"]
)
def test_numpy_headers_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.npy").write_bytes(content)
    refused(lambda: TokenFile(tmp_path / "t.npy", **SETTINGS), "numpy header cannot be read")


def test_a_folder_of_headerless_files_is_one_sequence(tmp_path: Path) -> None:
    for name, part in (("a.bin", TOKENS[:3]), ("b.bin", []), ("c.bin", TOKENS[3:])):
        np.asarray(part, "<u2").tofile(tmp_path / name)
    windows = TokenFile(tmp_path, **SETTINGS)
    assert_reads(windows, TOKENS)
    assert windows.source.place(3) == f"byte 0 of {tmp_path / 'c.bin'}"
    assert windows.fingerprint()["files"] == 3


def test_index_bytes_are_laid_out_as_the_format_says() -> None:
    index = megatron_index([[1, 2], [3]], code=8, item_bytes=2)
    assert index[34:42] == struct.pack("<ii", 2, 1)
    assert index[42:58] == struct.pack("<qq", 0, 4)
    assert index[58:] == struct.pack("<qqq", 0, 1, 2)


def numpy_file(folder: Path) -> Path:
    np.save(folder / "t.npy", np.asarray(TOKENS, "<u2"))
    return folder / "t.npy"


@pytest.mark.parametrize(
    ("write", "kind", "header_bytes"),
    [
        (lambda folder: write_megatron(folder, DOCUMENTS), MegatronTokens, 142),
        (
            lambda folder: write_llmc(folder / "t.bin", TOKENS, magic=20240520, item_bytes=2),
            LlmcTokens,
            12,
        ),
        (numpy_file, TokenFile, 128),
    ],
    ids=["megatron", "llmc", "numpy"],
)
@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_a_damaged_header_is_refused_or_harmless(
    tmp_path: Path,
    write: Callable[[Path], Path],
    kind: Callable[..., Windows],
    header_bytes: int,
    bits: int,
) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    count = 0
    for at in range(header_bytes):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :])
        try:
            windows = kind(path, **SETTINGS)
        except StreamError:
            count += 1
        else:
            for index in range(len(windows)):
                windows.window(index)
                windows.pieces(index)
    assert count > header_bytes // 2
