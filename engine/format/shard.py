"""The shard: one rank's safetensors file, planned before it exists, read back with suspicion.

`ShardPlan` fixes where every entry lies before any metadata is known, because the image of a shard
is staged at fixed offsets, save after save; only the header's metadata change. Nothing here touches
tensors.

A shard is plain safetensors (github.com/huggingface/safetensors, format section of its README):
8 bytes little-endian header length N, N bytes of JSON padded by spaces, then the data. On top of
that, the data begin at a multiple of 4096 bytes, for O_DIRECT and pinned copies, and the entries
lie by descending item size, so that each is aligned to its own item size.
"""

import json
import struct
from collections.abc import Iterable, Mapping

from engine.format.dtypes import ITEMSIZE
from engine.format.entry import (
    DATA_ALIGNMENT,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Entry,
    check_declared,
    metadata_of,
)
from engine.format.errors import FormatError
from engine.format.header import (
    ShardHeader,
    StoredEntry,
    check_metadata,
    data_offset_of,
    read_header,
)

__all__ = [
    "METADATA_ROOM_BYTES",
    "Entry",
    "ShardHeader",
    "ShardPlan",
    "StoredEntry",
    "check_metadata",
    "data_offset_of",
    "metadata_of",
    "read_header",
]

METADATA_ROOM_BYTES = 512
"""Room for `metadata_of` at its longest."""

_BEFORE_METADATA = b'{"__metadata__":'


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
        used = LENGTH_BYTES + len(_BEFORE_METADATA) + metadata_room_bytes + len(self._entries_json)
        self.data_offset = -(-used // DATA_ALIGNMENT) * DATA_ALIGNMENT
        if self.data_offset - LENGTH_BYTES > MAX_HEADER_BYTES:
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
        length = self.data_offset - LENGTH_BYTES
        text = _BEFORE_METADATA + encoded + self._entries_json
        return struct.pack("<Q", length) + text.ljust(length, b" ")


def _encode_entries(entries: tuple[Entry, ...]) -> bytes:
    """Return the header's JSON after the metadata, from the comma before the first entry."""
    seen: set[str] = set()
    parts: list[str] = []
    at = 0
    item_size = max(ITEMSIZE.values())
    for entry in entries:
        check_declared(entry.name, entry.dtype, entry.shape)
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
