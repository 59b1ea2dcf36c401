"""Megatron's ``.idx`` / ``.bin`` pairs, of Megatron-Core, GPT-NeoX and Megatron-DeepSpeed.

The ``.idx`` file, little-endian and unaligned: ``MMIDIDX\\0\\0``; u64 version 1; u8 dtype code; u64
sequences; u64 document indices (documents + 1); int32 length of each sequence in tokens; int64
pointer to each in bytes of the ``.bin``; int64 document indices (the first sequence of each
document, and at last their number); int8 mode of each sequence in multimodal files only. The
``.bin`` file is the tokens.

The three projects agree on codes 1 to 5. Codes 6 to 8 mean different types: see `_CODES`. Which one
it is shows in the size of the ``.bin``, but for code 7 of 4 bytes, where the setting ``dtype`` has
to say it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.stream.errors import StreamError
from engine.stream.files import mapped, prepared
from engine.stream.files.shard import ArrayShard
from engine.stream.files.shards import ShardedTokens
from engine.stream.source import Tokens, spread
from engine.stream.tokens import Windows

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1

_INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _INTEGERS}
# By code: what Megatron-Core, GPT-NeoX and Megatron-DeepSpeed mean by it.
_CODES = {
    1: ("uint8",),
    2: ("int8",),
    3: ("int16",),
    4: ("int32",),
    5: ("int64",),
    6: ("float64", "float32", "uint16"),
    7: ("float32", "float64", "uint32"),
    8: ("uint16", "uint16", "uint64"),
}
UINT16_CODE, INT32_CODE = 8, 4  # what Megatron-Core writes

# Indices of up to this many entries are checked whole, larger ones in blocks of that many in all.
_CHECKED_BLOCKS, _CHECKED_BLOCK = 64, 1 << 18


class MegatronTokens(Windows):
    """Windows over ``.idx`` / ``.bin`` pairs, cut from the tokens as they follow each other.

    Args:
        path: one file of a pair, or a folder of pairs, which are taken in the order of their paths.
        seq_len: tokens per sample.
        component: the component's name, for errors.
        dtype: of the tokens, where the index does not say it, or says it wrong.
        end_of_document: a token to put after each document, if the files have none there.
        vocab_size: if given, a token that is not below it is an error.

    Raises:
        StreamError: a file is missing, torn, holds floats, or index and tokens do not agree.
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
        if dtype is not None and dtype not in DTYPES:
            raise StreamError(f"{where}: dtype is {dtype!r}, wanted one of {', '.join(DTYPES)}")
        pairs = [_pair(file) for file in mapped.find(path, (".idx",), component)]
        shards = [_open(index, tokens, dtype, component) for index, tokens in pairs]
        source = ShardedTokens(
            shards,
            files=[file for pair in pairs for file in pair],
            kind="megatron tokens",
            component=component,
            path=path,
            end_of_document=end_of_document,
        )
        super().__init__(source, seq_len=seq_len, vocab_size=vocab_size)
        self._folder = pairs[0][0].parent

    def decode(self, tokens: npt.NDArray[Any]) -> str | None:
        """Return tokens as text, if everstep-data prepare made them."""
        return self._decoder(tokens) if self._decoder else None

    @cached_property
    def _decoder(self) -> prepared.Decode | None:
        return prepared.decoder(self._folder)


def count(path: Path) -> int:
    """Return how many sequences a whole index says there are."""
    with open(path, "rb") as file:
        _, _, _, sequences, _ = HEADER.unpack(file.read(HEADER.size))
    return int(sequences)


@dataclass(frozen=True)
class _Index:
    """An index file, mapped."""

    path: Path
    code: int
    lengths: Tokens
    pointers: Tokens
    documents: Tokens


@dataclass(frozen=True)
class _DocumentBegins:
    """Where documents begin, in tokens. Reads the mapped index where it is asked."""

    index: _Index
    size: int
    item_bytes: int

    def __len__(self) -> int:
        return len(self.index.documents)

    def __getitem__(self, number: int) -> int:
        sequence = int(self.index.documents[number])
        if sequence == len(self.index.pointers):
            return self.size
        return int(self.index.pointers[sequence]) // self.item_bytes


def _pair(path: Path) -> tuple[Path, Path]:
    stem = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
    return stem.with_name(stem.name + ".idx"), stem.with_name(stem.name + ".bin")


def _open(index_path: Path, tokens_path: Path, dtype: str | None, component: str) -> ArrayShard:
    index = _read_index(index_path, component)
    size_bytes = mapped.size_of(tokens_path, component)
    token_count = _tokens_in(index, component)
    kind = _dtype_of(index, token_count, size_bytes, tokens_path, dtype, component)
    _check_pointers(index, kind.itemsize, size_bytes, component)
    tokens = mapped.map_array(tokens_path, kind, 0, token_count)
    return ArrayShard(
        tokens_path, tokens, begins=_DocumentBegins(index, token_count, kind.itemsize)
    )


def _read_index(path: Path, component: str) -> _Index:
    where = f"component {component!r}: {path}"
    size = mapped.size_of(path, component)
    head = mapped.read_head(path, HEADER.size, component)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise StreamError(f"{where}: is not a Megatron index: it does not begin with {MAGIC!r}")
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != VERSION:
        raise StreamError(f"{where}: has version {version}, wanted {VERSION}")
    modes_at = HEADER.size + 12 * sequences + 8 * documents
    if size not in (modes_at, modes_at + sequences):
        raise StreamError(
            f"{where}: has {size} bytes; with {sequences} sequences and {documents} document "
            f"indices it would have {modes_at}; the file is torn"
        )
    if not documents:
        raise StreamError(f"{where}: has no document indices, wanted the number of documents + 1")
    if size > modes_at and mapped.map_array(path, np.dtype("i1"), modes_at, sequences).any():
        raise StreamError(f"{where}: is of a multimodal data set; wanted text alone")
    pointers_at = HEADER.size + 4 * sequences
    return _Index(
        path,
        code,
        lengths=mapped.map_array(path, np.dtype("<i4"), HEADER.size, sequences),
        pointers=mapped.map_array(path, np.dtype("<i8"), pointers_at, sequences),
        documents=mapped.map_array(path, np.dtype("<i8"), pointers_at + 8 * sequences, documents),
    )


def _tokens_in(index: _Index, component: str) -> int:
    """Return the sum of all lengths."""
    total = 0
    for begin in range(0, len(index.lengths), _CHECKED_BLOCK):
        lengths = index.lengths[begin : begin + _CHECKED_BLOCK]
        if int(lengths.min()) < 0:
            number = begin + int(lengths.argmin())
            raise StreamError(
                f"component {component!r}: {index.path}: sequence {number} has length "
                f"{int(index.lengths[number])}; the file is damaged"
            )
        total += int(lengths.sum(dtype=np.int64))
    return total


def _dtype_of(
    index: _Index, tokens: int, size_bytes: int, path: Path, asked: str | None, component: str
) -> np.dtype[Any]:
    """Return the tokens' dtype: the one that is asked for, or the only one that fits."""
    where = f"component {component!r}: {index.path}"
    meant = dict.fromkeys(_CODES.get(index.code, ()))
    if asked is None and not meant:
        raise StreamError(
            f"{where}: dtype code {index.code} is unknown; set dtype to what it holds"
        )
    names = [asked] if asked is not None else list(meant)
    fitting = [name for name in names if tokens * np.dtype(name).itemsize == size_bytes]
    if not fitting:
        sizes = " or ".join(f"{tokens * np.dtype(name).itemsize} ({name})" for name in names)
        raise StreamError(
            f"{where}: its lengths add up to {tokens} tokens, which is {sizes} bytes, but {path} "
            f"has {size_bytes}; one of the two files is torn, or dtype must be set"
        )
    integers = [name for name in fitting if name in DTYPES]
    if not integers:
        raise StreamError(
            f"{where}: dtype code {index.code} and the size of {path} mean {fitting[0]}; tokens "
            "are integers. If they are, set dtype to their type"
        )
    if len(integers) < len(fitting):
        raise StreamError(
            f"{where}: dtype code {index.code} means {' or '.join(fitting)}, depending on who "
            f"wrote it, and the size of {path} fits both; if it holds integers, set "
            f"dtype={integers[0]}"
        )
    return DTYPES[integers[0]]


def _check_pointers(index: _Index, item_bytes: int, size_bytes: int, component: str) -> None:
    """Check that sequences follow each other, and that documents begin at sequences in order.

    Of very large indices, blocks are checked; that their lengths add up is known by now.
    """
    where = f"component {component!r}: {index.path}"
    count = len(index.lengths)
    for begin, end in spread(count, _CHECKED_BLOCKS, _CHECKED_BLOCK):
        pointers = index.pointers[begin:end]
        ends = pointers + index.lengths[begin:end].astype(np.int64) * item_bytes
        after = int(index.pointers[end]) if end < count else size_bytes
        wrong = np.flatnonzero(ends != np.append(pointers[1:], after))
        if wrong.size or (begin == 0 and pointers[0] != 0):
            number = begin + (int(wrong[0]) if wrong.size else 0)
            raise StreamError(
                f"{where}: sequence {number}, at byte {int(index.pointers[number])} with "
                f"{int(index.lengths[number])} tokens, does not end where the next one begins; "
                "the file is damaged"
            )
    documents = index.documents
    if int(documents[0]) != 0 or int(documents[-1]) != count:
        raise StreamError(
            f"{where}: document indices run from {int(documents[0])} to {int(documents[-1])}, "
            f"wanted 0 to {count}, the number of sequences"
        )
    for begin, end in spread(len(documents) - 1, _CHECKED_BLOCKS, _CHECKED_BLOCK):
        if (np.diff(documents[begin : end + 1]) < 0).any():
            raise StreamError(f"{where}: document indices are not in order; the file is damaged")
