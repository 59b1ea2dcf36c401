"""Token files of one array: headerless, numpy's, and llm.c's.

Headerless little-endian uint16 or uint32 is what nanoGPT writes as ``.bin``, and OLMo writes as
``.npy``, which has no numpy header there. A real numpy file is told by its magic. llm.c puts 256
int32 in front: a magic number, version 1, the number of tokens.
"""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from engine.stream.errors import StreamError
from engine.stream.files import mapped
from engine.stream.files.shard import ArrayShard
from engine.stream.files.shards import ShardedTokens
from engine.stream.tokens import Windows

TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

NUMPY_MAGIC = b"\x93NUMPY"
_NUMPY_HEADER_LIMIT = 1 << 16  # of bytes: a one-dimensional array's has about 100

LLMC_HEADER_BYTES = 256 * 4
LLMC_DTYPES: dict[int, np.dtype[Any]] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}


class TokenFile(Windows):
    """Windows over headerless files, or numpy's.

    Args:
        path: a file, or a folder of ``.bin`` and ``.npy`` files, which are taken in the order of
            their paths. They must not change while they are in use.
        dtype: "uint16" or "uint32", of headerless files. A numpy file says its own.
        seq_len: tokens per sample.
        component: the component's name, for errors.
        vocab_size: if given, a token that is not below it is an error.

    Raises:
        StreamError: a file is missing, torn, or holds something else; or all are shorter than a
            window.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        seq_len: int,
        dtype: str = "uint16",
        component: str,
        vocab_size: int | None = None,
    ) -> None:
        where = f"component {component!r}: {path}"
        if dtype not in TOKEN_DTYPES:
            raise StreamError(
                f"{where}: dtype is {dtype!r}, wanted one of {', '.join(TOKEN_DTYPES)}"
            )
        files = mapped.find(path, (".bin", ".npy"), component)
        shards = [_array(file, TOKEN_DTYPES[dtype], component) for file in files]
        source = ShardedTokens(
            shards, files=files, kind="token file", component=component, path=path
        )
        super().__init__(source, seq_len=seq_len, vocab_size=vocab_size)


class LlmcTokens(Windows):
    """Windows over the files of llm.c, of either magic number.

    Args:
        path: a file, or a folder of ``.bin`` files, which are taken in the order of their paths.
        seq_len: tokens per sample.
        component: the component's name, for errors.
        vocab_size: if given, a token that is not below it is an error.

    Raises:
        StreamError: a file is missing, torn, not of llm.c, or all are shorter than a window.
    """

    def __init__(
        self, path: str | Path, *, seq_len: int, component: str, vocab_size: int | None = None
    ) -> None:
        files = mapped.find(path, (".bin",), component)
        source = ShardedTokens(
            [_llmc(file, component) for file in files],
            files=files,
            kind="llm.c tokens",
            component=component,
            path=path,
        )
        super().__init__(source, seq_len=seq_len, vocab_size=vocab_size)


def _array(path: Path, dtype: np.dtype[Any], component: str) -> ArrayShard:
    size = mapped.size_of(path, component)
    if mapped.read_head(path, len(NUMPY_MAGIC), component) == NUMPY_MAGIC:
        return _numpy(path, size, component)
    if size % dtype.itemsize:
        raise StreamError(
            f"component {component!r}: {path}: {size} bytes is not a whole number of {dtype.name} "
            "tokens; the file is torn, has a header, or is of another dtype"
        )
    return ArrayShard(path, mapped.map_array(path, dtype, 0, size // dtype.itemsize))


def _numpy(path: Path, size: int, component: str) -> ArrayShard:
    where = f"component {component!r}: {path}"
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read(file, max_header_size=_NUMPY_HEADER_LIMIT)
            offset = file.tell()
    except (ValueError, KeyError, TypeError, SyntaxError, TokenError) as error:
        # numpy reads the header as Python, by ast; it may find anything wrong with it
        raise StreamError(f"{where}: its numpy header cannot be read: {error}") from error
    if len(shape) != 1 or dtype.kind not in "ui":
        raise StreamError(
            f"{where}: is an array of {dtype} with shape {shape}, wanted one dimension of integers"
        )
    _check_count(where, size - offset, shape[0], dtype)
    return ArrayShard(path, mapped.map_array(path, dtype, offset, shape[0]), byte_offset=offset)


def _llmc(path: Path, component: str) -> ArrayShard:
    where = f"component {component!r}: {path}"
    size = mapped.size_of(path, component)
    head = mapped.read_head(path, LLMC_HEADER_BYTES, component)
    if len(head) < LLMC_HEADER_BYTES:
        raise StreamError(
            f"{where}: has {size} bytes, wanted a header of {LLMC_HEADER_BYTES} and tokens"
        )
    magic, version, count = (int(word) for word in np.frombuffer(head, "<i4", count=3))
    if magic not in LLMC_DTYPES or version != 1:
        raise StreamError(
            f"{where}: begins with magic number {magic}, version {version}; llm.c's are "
            f"{' and '.join(map(str, LLMC_DTYPES))}, version 1"
        )
    dtype = LLMC_DTYPES[magic]
    _check_count(where, size - LLMC_HEADER_BYTES, count, dtype)
    tokens = mapped.map_array(path, dtype, LLMC_HEADER_BYTES, count)
    return ArrayShard(path, tokens, byte_offset=LLMC_HEADER_BYTES)


def _check_count(where: str, room_bytes: int, count: int, dtype: np.dtype[Any]) -> None:
    if count < 0 or count * dtype.itemsize != room_bytes:
        raise StreamError(
            f"{where}: its header says {count} tokens of {dtype.itemsize} bytes, but "
            f"{room_bytes} bytes follow it; the file is torn, or not what it says"
        )
