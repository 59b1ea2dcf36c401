"""datatrove's token files.

``X.ds`` is headerless uint16 or uint32. ``X.ds.index`` is the u64 end of each document, in tokens.
``X.ds.metadata`` is text: the tokenizer's name and the bytes of a token on the first line, after
the last ``|``; the number of tokens on the second. Index and metadata may be missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.stream.errors import StreamError
from engine.stream.files import mapped
from engine.stream.files.shard import ArrayShard, Begins
from engine.stream.files.shards import ShardedTokens
from engine.stream.source import Tokens, spread
from engine.stream.tokens import Windows

_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_METADATA_LIMIT = 1 << 16
_CHECKED_BLOCKS, _CHECKED_BLOCK = 64, 1 << 18


class DatatroveTokens(Windows):
    """Windows over ``.ds`` files.

    Args:
        path: a ``.ds`` file, or a folder of them, which are taken in the order of their paths.
        seq_len: tokens per sample.
        component: the component's name, for errors.
        dtype: "uint16" or "uint32", where a file has no metadata to say it.
        end_of_document: a token to put after each document, if the files have none there.
        vocab_size: if given, a token that is not below it is an error.

    Raises:
        StreamError: a file is missing or torn, or index, metadata and tokens do not agree.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        seq_len: int,
        component: str,
        dtype: str | None = None,
        end_of_document: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        where = f"component {component!r}: {path}"
        asked = {None: None, "uint16": 2, "uint32": 4}
        if dtype not in asked:
            raise StreamError(f"{where}: dtype is {dtype!r}, wanted uint16 or uint32")
        files = mapped.find(path, (".ds",), component)
        shards = [_open(file, asked[dtype], component) for file in files]
        beside = [_beside(file, "index") for file in files]
        source = ShardedTokens(
            shards,
            files=[*files, *(file for file in beside if file.exists())],
            kind="datatrove tokens",
            component=component,
            path=path,
            end_of_document=end_of_document,
        )
        super().__init__(source, seq_len=seq_len, vocab_size=vocab_size)


class _Begins:
    """Document begins from mapped document ends."""

    def __init__(self, ends: Tokens) -> None:
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends) + 1

    def __getitem__(self, number: int) -> int:
        # bisect asks for numbers from 0 up; the ends have no entry for the first begin.
        return int(self._ends[number - 1]) if number > 0 else 0


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f"{path.name}.{what}")


def _open(path: Path, asked: int | None, component: str) -> ArrayShard:
    size = mapped.size_of(path, component)
    item, count = _metadata(path, component) if _beside(path, "metadata").exists() else (None, None)
    if item is None and asked is None:
        raise StreamError(
            f"component {component!r}: {path}: has no .metadata file beside it; set dtype to "
            "uint16 or uint32"
        )
    dtype = _DTYPES[asked or item or 0]
    if size % dtype.itemsize or (count is not None and count * dtype.itemsize != size):
        wanted = f"{count} tokens" if count is not None else "a whole number of tokens"
        raise StreamError(
            f"component {component!r}: {path}: has {size} bytes, wanted {wanted} of "
            f"{dtype.itemsize} bytes; the file is torn, or of another dtype"
        )
    tokens = mapped.map_array(path, dtype, 0, size // dtype.itemsize)
    return ArrayShard(path, tokens, begins=_begins(path, tokens.size, component))


def _metadata(path: Path, component: str) -> tuple[int, int]:
    """Return the bytes of a token, and the number of tokens."""
    metadata = _beside(path, "metadata")
    text = mapped.read_head(metadata, _METADATA_LIMIT, component).decode("utf-8", "replace")
    try:
        first, second = text.splitlines()[:2]
        item, count = int(first.rsplit("|", 1)[1]), int(second)
        if item not in _DTYPES or count < 0:
            raise ValueError
    except (ValueError, IndexError):
        raise StreamError(
            f"component {component!r}: {metadata}: wanted 'tokenizer|2' or '|4' on the first line "
            f"and the number of tokens on the second, found {text[:80]!r}"
        ) from None
    return item, count


def _begins(path: Path, size: int, component: str) -> Begins | None:
    index = _beside(path, "index")
    if not index.exists():
        return None
    where = f"component {component!r}: {index}"
    size_bytes = mapped.size_of(index, component)
    if size_bytes % 8:
        raise StreamError(
            f"{where}: {size_bytes} bytes is not a whole number of document ends of 8 bytes"
        )
    ends = mapped.map_array(index, np.dtype("<u8"), 0, size_bytes // 8)
    last = int(ends[-1]) if ends.size else 0
    if last != size:
        raise StreamError(
            f"{where}: the last document ends at token {last}, but {path} has {size} tokens; one "
            "of the two files is torn"
        )
    for begin, end in spread(ends.size, _CHECKED_BLOCKS, _CHECKED_BLOCK):
        block = ends[begin : end + 1]
        if (block[1:] < block[:-1]).any():
            raise StreamError(f"{where}: document ends are not in order; the file is damaged")
    return _Begins(ends)
