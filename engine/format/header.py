"""Read the header of a shard, trusting no length, offset or name in it."""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.format import sealed
from engine.format.dtypes import ITEMSIZE
from engine.format.entry import (
    DATA_ALIGNMENT,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    SHARD_VERSION,
    check_declared,
    metadata_of,
)
from engine.format.errors import DamagedError, FormatError, UnknownVersionError

_MAX_DIMENSIONS = 64


class StoredEntry(NamedTuple):
    """An entry found in a file; its data are the bytes [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ShardHeader:
    """A shard's header as found in a file.

    metadata     the free strings of ``__metadata__``
    entries      every entry by name, in the order of the header
    data_offset  where the header ends and the data begin, in bytes
    """

    metadata: dict[str, str]
    entries: dict[str, StoredEntry]
    data_offset: int


def read_header(source: int | bytes | bytearray | memoryview, file_size: int) -> ShardHeader:
    """Read and check a shard's header.

    Any safetensors file that keeps the two rules of `engine.format.shard` is read, whatever its
    metadata; `check_metadata` tells whether it is a shard, and whose.

    Args:
        source: a file descriptor, read with pread, or the file's bytes, at least its header.
        file_size: the size of the whole file in bytes.

    Raises:
        FormatError: the header is not what the format allows. The message names the entry, not the
            file.
        OSError: the file cannot be read.
    """
    data_offset = data_offset_of(source, file_size)
    text = _read(source, LENGTH_BYTES, data_offset - LENGTH_BYTES, file_size).rstrip(b" ")
    if not (text.startswith(b"{") and text.endswith(b"}")):
        raise FormatError("the header is not a JSON object padded by spaces")
    fields = sealed.parse(text, "header")
    metadata = _checked_metadata(fields.pop("__metadata__", {}))
    entries = {
        name: _checked_entry(name, field, data_offset, file_size) for name, field in fields.items()
    }
    _check_tiling(entries, data_offset, file_size)
    return ShardHeader(metadata, entries, data_offset)


def data_offset_of(source: int | bytes | bytearray | memoryview, file_size: int) -> int:
    """Return where a shard says that its data begin. Arguments and errors as for `read_header`."""
    (length,) = struct.unpack("<Q", _read(source, 0, LENGTH_BYTES, file_size))
    data_offset: int = LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or data_offset > file_size:
        raise FormatError(
            f"header length is {length} bytes; the file has {file_size}, the limit is "
            f"{MAX_HEADER_BYTES}"
        )
    if data_offset % DATA_ALIGNMENT:
        raise FormatError(f"data begin at byte {data_offset}; wanted a multiple of 4096")
    return data_offset


def check_metadata(header: ShardHeader, save_id: str, rank: int, world_size: int) -> None:
    """Check that a header belongs to the shard of `rank` of `world_size` in the save `save_id`.

    Raises:
        UnknownVersionError: the shard is of another format version.
        FormatError: it is not such a shard; found and wanted are on lines of their own.
    """
    wanted = metadata_of(save_id, rank, world_size)
    version = header.metadata.get("everstep_version")
    if version is not None and version != SHARD_VERSION:
        raise UnknownVersionError(
            f"shard format version is {version!r}, this Everstep reads {SHARD_VERSION!r}; "
            "read it with the version of Everstep that wrote it, or a newer one"
        )
    if header.metadata != wanted:
        raise FormatError(
            f"belongs to another shard\n  found:  {header.metadata}\n  wanted: {wanted}"
        )


def _read(
    source: int | bytes | bytearray | memoryview, begin: int, length: int, file_size: int
) -> bytes:
    if isinstance(source, int):
        data = b""
        while len(data) < length and (more := os.pread(source, length - len(data), begin)):
            data += more
            begin += len(more)
    else:
        data = bytes(source[begin : begin + length])
    if len(data) != length:
        raise DamagedError(
            f"the header ends early: {len(data)} of {length} bytes; file size {file_size}"
        )
    return data


def _checked_metadata(field: sealed.JSON) -> dict[str, str]:
    if not isinstance(field, dict) or not all(isinstance(value, str) for value in field.values()):
        raise FormatError("__metadata__: wanted an object whose values are strings")
    return field


def _checked_entry(name: str, field: sealed.JSON, data_offset: int, file_size: int) -> StoredEntry:
    where = name[:200]
    if not isinstance(field, dict) or field.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: wanted the fields dtype, shape and data_offsets, no others")
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"{where}: wanted a shape of at most {_MAX_DIMENSIONS} dimensions")
    check_declared(name, dtype, shape)
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        raise FormatError(f"{where}: wanted two integers as data_offsets")
    begin, end = data_offset + offsets[0], data_offset + offsets[1]
    if not data_offset <= begin <= end <= file_size:
        raise FormatError(f"{where}: data_offsets {offsets} are outside of the file's data")
    wanted = math.prod(shape) * ITEMSIZE[dtype]
    if end - begin != wanted:
        raise FormatError(
            f"{where}: {end - begin} bytes of data; {dtype} of shape {shape} has {wanted}"
        )
    if begin % ITEMSIZE[dtype]:
        raise FormatError(f"{where}: begins at byte {begin}, not aligned for {dtype}")
    return StoredEntry(dtype, tuple(shape), begin, end)


def _check_tiling(entries: Mapping[str, StoredEntry], data_offset: int, file_size: int) -> None:
    """Check that the entries cover the data exactly: no byte twice, none left out."""
    at = data_offset
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "overlaps the entry before it" if entry.begin < at else "leaves a hole before it"
            raise FormatError(f"{name[:200]}: {what}: begins at byte {entry.begin}, wanted {at}")
        at = entry.end
    if at != file_size:
        raise DamagedError(f"the entries end at byte {at}, the file at {file_size}")
