"""One part: the documents of its spans -> one Megatron pair. Runs in a worker process.

Both files are written under dot names, made durable, and renamed; the index last. A pair whose
index has its name is whole. The bytes depend on the part alone, so it does no harm if a worker of
a killed start should finish the same part at the same time.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.prepare import inputs
from engine.prepare.encoders import Encoder
from engine.prepare.errors import InputError
from engine.prepare.inputs import File, Reading, Span
from engine.stream.files import megatron

MAX_SEQUENCE = 2**31 - 1  # the format's lengths are int32
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """A part's work.

    Attributes:
        number: its place among the parts.
        spans: what it reads.
        files: the files that the spans are of, as they were found.
    """

    number: int
    spans: Sequence[Span]
    files: Sequence[File]


@dataclass(frozen=True)
class Made:
    """What became of a part."""

    number: int
    documents: int
    tokens: int


def stem(number: int) -> str:
    """Return the name that a part's two files share."""
    return f"part_{number:05}"


def is_made(folder: Path, number: int) -> bool:
    """Say whether a part's files are there, whole."""
    return (folder / f"{stem(number)}.idx").exists()


def make(
    part: Part, reading: Reading, encoder: Encoder, folder: Path, advance: Callable[[int], None]
) -> Made:
    """Write a part's pair into a folder.

    Args:
        part: the work.
        reading: how documents are taken from the spans.
        encoder: how they become tokens.
        folder: where the pair goes.
        advance: told the bytes of input after each document; may raise to stop the work.

    Raises:
        InputError: a document cannot be used, or a file is not as it was found.
    """
    for file in part.files:
        if inputs.describe(file.path) != file:
            raise InputError(f"{file.path}: was changed while it was in use; begin anew")
    ends = [] if encoder.end_of_document is None else [encoder.end_of_document]
    end = np.asarray(ends, dtype=encoder.dtype)
    lengths = array("i")
    name = stem(part.number)
    under_way = folder / f".{name}.bin.{os.getpid()}"
    with open(under_way, "wb", buffering=_BUFFER_BYTES) as out:
        for span in part.spans:
            left_bytes = span.cost_bytes
            for document in inputs.documents(span, reading):
                tokens = encoder.encode(document)
                size = tokens.size + len(end)
                if size > MAX_SEQUENCE:
                    raise InputError(
                        f"{document.where}: is one document of {size} tokens, and the format holds "
                        f"up to {MAX_SEQUENCE}; --text-lines makes one of each line"
                    )
                out.write(tokens.data)
                out.write(end.data)
                lengths.append(size)
                advance(document.cost_bytes)
                left_bytes -= document.cost_bytes
            # Of what was no document; or less than nothing, as the last line may end outside.
            advance(left_bytes)
        _make_durable(out.fileno(), out.flush)
    os.rename(under_way, folder / f"{name}.bin")
    _write_index(folder / f"{name}.idx", np.asarray(lengths, "<i4"), encoder.dtype)
    return Made(part.number, len(lengths), int(np.sum(lengths, dtype=np.int64)))


def _write_index(path: Path, lengths: npt.NDArray[np.int32], dtype: np.dtype[Any]) -> None:
    code = megatron.UINT16_CODE if dtype.itemsize == 2 else megatron.INT32_CODE
    count = lengths.size
    ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
    pointers = np.concatenate([np.zeros(min(1, count), "<i8"), ends[:-1]])
    under_way = path.with_name(f".{path.name}.{os.getpid()}")
    with open(under_way, "wb") as out:
        out.write(megatron.HEADER.pack(megatron.MAGIC, megatron.VERSION, code, count, count + 1))
        for values in (lengths, pointers, np.arange(count + 1, dtype="<i8")):
            out.write(values.tobytes())
        _make_durable(out.fileno(), out.flush)
    os.rename(under_way, path)


def _make_durable(descriptor: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(descriptor)
