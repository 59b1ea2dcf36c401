"""Token files made byte by byte, from what their formats are said to be."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Documents = Sequence[Sequence[int]]

# By Megatron-Core.
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def flat(documents: Documents) -> list[int]:
    """Return the documents' tokens behind each other."""
    return [token for document in documents for token in document]


def megatron_index(
    documents: Documents,
    *,
    code: int,
    item_bytes: int,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    indices: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    modes: bytes = b"",
) -> bytes:
    """Return an index, one sequence a document."""
    counts = [len(document) for document in documents]
    starts = np.cumsum([0, *counts])[:-1] * item_bytes
    where = list(range(len(documents) + 1)) if indices is None else indices
    head = magic + struct.pack("<QBQQ", version, code, len(counts), len(where))
    arrays = [
        np.asarray(counts if lengths is None else lengths, "<i4").tobytes(),
        np.asarray(starts, "<i8").tobytes(),
        np.asarray(where, "<i8").tobytes(),
    ]
    return head + b"".join(arrays) + modes


def write_megatron(
    folder: Path, documents: Documents, *, dtype: str = "uint16", name: str = "m", **index: Any
) -> Path:
    """Write a pair and return the index's path."""
    tokens = np.asarray(flat(documents), np.dtype(dtype).newbyteorder("<"))
    (folder / f"{name}.bin").write_bytes(tokens.tobytes())
    settings = {"code": CODES.get(dtype), "item_bytes": tokens.itemsize, **index}
    (folder / f"{name}.idx").write_bytes(megatron_index(documents, **settings))
    return folder / f"{name}.idx"


def write_datatrove(
    folder: Path, documents: Documents, *, item_bytes: int = 2, name: str = "d"
) -> Path:
    """Write the three files and return the first one's path."""
    path = folder / f"{name}.ds"
    np.asarray(flat(documents), f"<u{item_bytes}").tofile(path)
    ends = np.cumsum([len(document) for document in documents])
    path.with_name(f"{name}.ds.index").write_bytes(ends.astype("<u8").tobytes())
    total = len(flat(documents))
    path.with_name(f"{name}.ds.metadata").write_text(f"some|gpt2|{item_bytes}\n{total}\n9 T")
    return path


def write_llmc(
    path: Path, tokens: Sequence[int], *, magic: int, item_bytes: int, version: int = 1
) -> Path:
    """Write a header of 256 int32, and tokens."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, f"<u{item_bytes}").tobytes())
    return path
