"""The shard: one rank's safetensors file, planned before it exists, read back with suspicion.

`ShardPlan` fixes where every entry lies before any metadata is known, because the image of a shard
is staged at fixed offsets, save after save; only the header's metadata change. `read_header` trusts
no length, offset or name in a file. Nothing here touches tensors.

A shard is plain safetensors (github.com/huggingface/safetensors, format section of its README):
8 bytes little-endian header length N, N bytes of JSON padded by spaces, then the data. On top of
that, the data begin at a multiple of 4096 bytes, for O_DIRECT and pinned copies, and the entries
lie by descending item size, so that each is aligned to its own item size.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.format import sealed
from engine.format.dtypes import ITEMSIZE
from engine.format.errors import DamagedError, FormatError, UnknownVersionError

DATA_ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
METADATA_ROOM_BYTES = 512
"""Room for `metadata_of` at its longest."""

SHARD_VERSION = "1"
_MAX_DIMENSIONS = 64
_LENGTH_BYTES = 8
_BEFORE_METADATA = b'{"__metadata__":'


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard: its name, safetensors' name of its dtype, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the entry's data."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


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


class ShardPlan:
    """Where every byte of a shard lies.

    Attributes:
        entries: the entries in file order.
        data_offset: bytes of the header, its length field and padding included.
        size_bytes: size of the file.
        spans: each entry's bytes [begin, end) in the file, by name.
    """

    def __init__(self, entries: Iterable[Entry], metadata_room_bytes: int = METADATA_ROOM_BYTES):
        """Lay `entries` out in the given order.

        Args:
            metadata_room_bytes: the most bytes of JSON that the metadata may take; reserved now, so
                that no offset depends on them.

        Raises:
            FormatError: a name, dtype or shape is not allowed, a name is there twice, the order is
                not by descending item size, or the header would be too long.
        """
        self.entries = tuple(entries)
        self._metadata_room_bytes = metadata_room_bytes
        self._entries_json = _encode_entries(self.entries)
        used = _LENGTH_BYTES + len(_BEFORE_METADATA) + metadata_room_bytes + len(self._entries_json)
        self.data_offset = -(-used // DATA_ALIGNMENT) * DATA_ALIGNMENT
        if self.data_offset - _LENGTH_BYTES > MAX_HEADER_BYTES:
            raise FormatError(
                f"the header of {len(self.entries)} entries needs {used} bytes; safetensors allows "
                f"{MAX_HEADER_BYTES}"
            )
        self.spans: dict[str, tuple[int, int]] = {}
        end = self.data_offset
        for entry in self.entries:
            begin, end = end, end + entry.size_bytes
            self.spans[entry.name] = (begin, end)
        self.size_bytes = end

    def header_bytes(self, metadata: Mapping[str, str]) -> bytes:
        """Return the first `data_offset` bytes of the file.

        Raises:
            FormatError: `metadata` do not fit the room reserved for them.
        """
        encoded = json.dumps(dict(metadata), separators=(",", ":")).encode("ascii")
        if len(encoded) > self._metadata_room_bytes:
            raise FormatError(
                f"the shard's metadata take {len(encoded)} bytes, reserved are "
                f"{self._metadata_room_bytes}; plan the shard with more metadata_room_bytes"
            )
        length = self.data_offset - _LENGTH_BYTES
        text = _BEFORE_METADATA + encoded + self._entries_json
        return struct.pack("<Q", length) + text.ljust(length, b" ")


def metadata_of(save_id: str, rank: int, world_size: int) -> dict[str, str]:
    """Return the metadata that a shard's header carries."""
    return {
        "everstep_version": SHARD_VERSION,
        "save_id": save_id,
        "rank": str(rank),
        "world_size": str(world_size),
    }


def read_header(source: int | bytes | bytearray | memoryview, file_size: int) -> ShardHeader:
    """Read and check a shard's header.

    Any safetensors file that keeps the two rules of the module docstring is read, whatever its
    metadata; `check_metadata` tells whether it is a shard, and whose.

    Args:
        source: a file descriptor, read with pread, or the file's bytes, at least its header.
        file_size: the size of the whole file in bytes.

    Raises:
        FormatError: the header is not what the format allows. The message names the entry, not the
            file.
        OSError: the file cannot be read.
    """
    (length,) = struct.unpack("<Q", _read(source, 0, _LENGTH_BYTES, file_size))
    data_offset = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or data_offset > file_size:
        raise FormatError(
            f"header length is {length} bytes; the file has {file_size}, the limit is "
            f"{MAX_HEADER_BYTES}"
        )
    if data_offset % DATA_ALIGNMENT:
        raise FormatError(f"data begin at byte {data_offset}; wanted a multiple of 4096")
    text = _read(source, _LENGTH_BYTES, length, file_size).rstrip(b" ")
    if not (text.startswith(b"{") and text.endswith(b"}")):
        raise FormatError("the header is not a JSON object padded by spaces")
    fields = sealed.parse(text, "header")
    metadata = _checked_metadata(fields.pop("__metadata__", {}))
    entries = {
        name: _checked_entry(name, field, data_offset, file_size) for name, field in fields.items()
    }
    _check_tiling(entries, data_offset, file_size)
    return ShardHeader(metadata, entries, data_offset)


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


def _encode_entries(entries: tuple[Entry, ...]) -> bytes:
    """Return the header's JSON after the metadata, from the comma before the first entry."""
    seen: set[str] = set()
    parts: list[str] = []
    at = 0
    item_size = max(ITEMSIZE.values())
    for entry in entries:
        _check_declared(entry.name, entry.dtype, entry.shape)
        if entry.name in seen or entry.name == "__metadata__":
            raise FormatError(f"{entry.name}: the name is there twice, or reserved")
        seen.add(entry.name)
        if ITEMSIZE[entry.dtype] > item_size:
            raise FormatError(
                f"{entry.name}: {entry.dtype} after an entry of {item_size}-byte items; entries "
                "must be in order of descending item size"
            )
        item_size = ITEMSIZE[entry.dtype]
        field = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (at, at + entry.size_bytes),
        }
        parts.append(f",{json.dumps(entry.name)}:{json.dumps(field, separators=(',', ':'))}")
        at += entry.size_bytes
    return ("".join(parts) + "}").encode("ascii")


def _check_declared(name: str, dtype: object, shape: Iterable[object]) -> None:
    if not name.isascii():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError(f"{name!r}: the name is not valid Unicode") from error
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise FormatError(f"{name[:200]}: dtype {dtype!r:.50}; wanted one of {', '.join(ITEMSIZE)}")
    if any(type(size) is not int or not 0 <= size < 1 << 63 for size in shape):
        raise FormatError(f"{name[:200]}: the shape must be integers from 0 to 2^63 - 1")


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
    _check_declared(name, dtype, shape)
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
