"""Read a directory of weights in the Hugging Face layout, any part of any tensor of it.

One `model.safetensors`, or shards and their index. Headers are read once and trusted in nothing: no
file outside of the directory is opened, and no tensor reaches beyond its file. No torch; what is
read is bytes.
"""

import os
import struct
from dataclasses import dataclass
from typing import Any

from engine.exchange.errors import ExchangeError
from engine.exchange.shards import INDEX_NAME, SINGLE_NAME
from engine.format import sealed
from engine.format.digest import digest_bytes
from engine.format.dtypes import ITEMSIZE
from engine.format.entry import LENGTH_BYTES, MAX_HEADER_BYTES, Entry, check_declared
from engine.format.errors import FormatError

_MAX_INDEX_BYTES = 1 << 30


@dataclass(frozen=True)
class Located:
    """A tensor of the directory: what it is, and the byte of the file where it begins."""

    entry: Entry
    file: str
    begin: int


class PretrainedDirectory:
    """The weights in a directory.

    Attributes:
        path: of the directory, absolute.
        tensors: every tensor by name.
        identity: what the directory was, as JSON: each file's size and the digest of its header.
    """

    def __init__(self, path: str) -> None:
        """Read the index and every header.

        Raises:
            ExchangeError: there are no safetensors weights, or a file is not what it should be.
        """
        self.path = os.path.abspath(path)
        self.tensors: dict[str, Located] = {}
        files: dict[str, Any] = {}
        for name in self._file_names():
            try:
                files[name] = self._read_header(name)
            except (OSError, FormatError) as error:
                text = error.strerror if isinstance(error, OSError) else error
                raise ExchangeError(f"{os.path.join(self.path, name)}: {text}") from error
        self.identity = {"directory": self.path, "files": files}

    def read(self, name: str, first: int, last: int) -> bytearray:
        """Return the bytes of the elements [first, last) of the flattened tensor `name`. Blocking.

        Raises:
            ExchangeError: the file cannot be read, or is shorter than it was.
        """
        located = self.tensors[name]
        size = ITEMSIZE[located.entry.dtype]
        path = os.path.join(self.path, located.file)
        data = bytearray((last - first) * size)
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(located.begin + first * size)
                view, at = memoryview(data), 0
                while at < len(data) and (count := file.readinto(view[at:])):
                    at += count
        except OSError as error:
            raise ExchangeError(f"{path}: {error.strerror}") from error
        if at < len(data):
            raise ExchangeError(f"{path}: ends within {name}: it was changed while it was read")
        return data

    def _file_names(self) -> list[str]:
        try:
            inside = sorted(os.listdir(self.path))
        except OSError as error:
            raise ExchangeError(f"{self.path}: cannot be listed: {error.strerror}") from error
        if INDEX_NAME in inside:
            return self._names_in_index(inside)
        if SINGLE_NAME in inside:
            return [SINGLE_NAME]
        found = "nothing of that"
        if pickled := [name for name in inside if name.endswith((".bin", ".pt", ".pth"))]:
            found = (
                f"only pickled files ({pickled[0]}), which are not read. Save it with transformers"
            )
        raise ExchangeError(
            f"{self.path}: wanted {SINGLE_NAME}, or {INDEX_NAME} and its shards; there is {found}"
        )

    def _names_in_index(self, inside: list[str]) -> list[str]:
        path = os.path.join(self.path, INDEX_NAME)
        try:
            with open(path, "rb") as file:
                document = sealed.parse(file.read(_MAX_INDEX_BYTES), path)
            weight_map = document["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, FormatError, KeyError, TypeError, AttributeError) as error:
            raise ExchangeError(f"{path}: not an index of safetensors shards: {error}") from error
        missing = [name for name in names if name not in inside]
        if missing:
            raise ExchangeError(f"{path}: names files that are not beside it: {missing[:5]}")
        return names

    def _read_header(self, name: str) -> dict[str, Any]:
        """Add the tensors of one file; return its identity."""
        with open(os.path.join(self.path, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(LENGTH_BYTES)
            if len(prefix) < LENGTH_BYTES:
                raise FormatError(f"is no safetensors file: it has {size} bytes")
            (length,) = struct.unpack("<Q", prefix)
            data_offset = LENGTH_BYTES + length
            if length > MAX_HEADER_BYTES or data_offset > size:
                raise FormatError(f"is no safetensors file: a header of {length} bytes in {size}")
            text = file.read(length)
        fields = sealed.parse(text, "its header")
        if not isinstance(fields, dict):
            raise FormatError("its header is not a JSON object")
        for tensor, field in fields.items():
            if tensor != "__metadata__":
                self._add(tensor, _located(tensor, field, name, data_offset, size))
        return {"size_bytes": size, "header_digest": digest_bytes(prefix + text)}

    def _add(self, name: str, located: Located) -> None:
        if name in self.tensors:
            raise FormatError(f"has {name}, which {self.tensors[name].file} has, too")
        self.tensors[name] = located


def _located(name: str, field: Any, file: str, data_offset: int, size: int) -> Located:
    """Check what a header says of one tensor."""
    try:
        dtype, shape = field["dtype"], tuple(field["shape"])
        begin, end = field["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"its header describes {name[:200]!r} wrongly: {field!r:.200}") from error
    check_declared(name, dtype, shape)
    entry = Entry(name, dtype, shape)
    whole = type(begin) is int and type(end) is int and 0 <= begin <= end <= size - data_offset
    if not whole or end - begin != entry.size_bytes:
        raise FormatError(f"{name[:200]}: bytes [{begin}, {end}) do not fit {dtype} {list(shape)}")
    return Located(entry, file, data_offset + begin)
