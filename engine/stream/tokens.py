"""Token sequences as map-style data sets of overlapping windows.

`TokenWindows` cuts one long array of tokens into samples of ``seq_len + 1`` tokens that overlap by
one, so that every token but the first is predicted exactly once per epoch. `TokenFile` does it to
a file of raw little-endian uint16 or uint32, without a header, mapped and never read whole.

Both refuse data that cannot be right (a missing or torn file, one shorter than a window, a token
outside the vocabulary) by naming the component and the path.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from engine.stream.errors import StreamError

TOKEN_DTYPES = {"uint16": "<u2", "uint32": "<u4"}

DIGEST_BLOCKS = 64
DIGEST_BLOCK_BYTES = 1 << 16


class TokenWindows:
    """Windows over an array of tokens.

    Args:
        tokens: one-dimensional, of an unsigned integer type; kept, not copied.
        seq_len: tokens per sample.
        source: what the tokens are, for errors and as the fingerprint's kind.

    Raises:
        StreamError: the tokens do not fill one window.
    """

    def __init__(self, tokens: npt.NDArray[Any], *, seq_len: int, source: str) -> None:
        if seq_len < 1:
            raise StreamError(f"{source}: seq_len must be 1 or more, found {seq_len}")
        if tokens.size < seq_len + 1:
            raise StreamError(
                f"{source}: holds {tokens.size} tokens, wanted at least seq_len + 1 = "
                f"{seq_len + 1}; give it more text, or lower seq_len"
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self.source = source

    def __len__(self) -> int:
        return (self.tokens.size - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels``, each int64 of ``[seq_len]``.

        ``labels[t]`` is the token after ``input_ids[t]``: they are shifted already.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.source}: no window {index}, it has {len(self)}")
        begin = index * self.seq_len
        window = torch.from_numpy(self.tokens[begin : begin + self.seq_len + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}

    def fingerprint(self) -> dict[str, Any]:
        """Return kind, size, dtype, window length and a digest of all tokens, as JSON."""
        return {
            "kind": self.source,
            "tokens": int(self.tokens.size),
            "dtype": self.tokens.dtype.name,
            "seq_len": self.seq_len,
            "digest": xxhash.xxh3_128(self.tokens.data).hexdigest(),
        }


class TokenFile(TokenWindows):
    """Windows over a headerless file of tokens.

    Args:
        path: the file; it must not change while it is in use.
        dtype: "uint16" or "uint32", little-endian.
        seq_len: tokens per sample.
        component: the component's name, for errors.
        vocab_size: if given, a token that is not below it is an error. (In the model it would be
            an index out of range, which on an accelerator ends the process without naming it.)

    Raises:
        StreamError: the file is missing, torn, or shorter than one window.
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
        self.path = Path(path)
        where = f"component {component!r}: {self.path}"
        if dtype not in TOKEN_DTYPES:
            raise StreamError(
                f"{where}: dtype is {dtype!r}, wanted one of {', '.join(TOKEN_DTYPES)}"
            )
        item = np.dtype(TOKEN_DTYPES[dtype])
        size_bytes = _size_of(self.path, where)
        if size_bytes % item.itemsize:
            raise StreamError(
                f"{where}: {size_bytes} bytes is not a whole number of {dtype} tokens; the file is "
                "torn, has a header, or is of another dtype"
            )
        # An empty file cannot be mapped; the check on its length names it.
        tokens = np.memmap(self.path, item, mode="r") if size_bytes else np.empty(0, dtype=item)
        super().__init__(tokens, seq_len=seq_len, source=where)
        self.dtype = dtype
        self.vocab_size = vocab_size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels``, each int64 of ``[seq_len]``."""
        sample = super().__getitem__(index)
        if self.vocab_size is not None:
            largest = max(int(part.max()) for part in sample.values())
            if largest >= self.vocab_size:
                raise StreamError(
                    f"{self.source}: token {largest} in window {index}, wanted tokens below the "
                    f"vocabulary's size {self.vocab_size}; is the dtype right ({self.dtype})?"
                )
        return sample

    def fingerprint(self) -> dict[str, Any]:
        """Return kind, size, dtype, window length and a digest of blocks of the file, as JSON.

        The blocks are spread evenly and include the head and the tail: a file of terabytes is told
        from another in a moment, at the price of not seeing a change between the blocks. The path
        is not part of it: a file may move.
        """
        return {
            "kind": "token file",
            "size_bytes": self.path.stat().st_size,
            "dtype": self.dtype,
            "seq_len": self.seq_len,
            "digest_of_some_blocks": _digest_blocks(self.path),
        }


def _size_of(path: Path, where: str) -> int:
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise StreamError(
            f"{where}: cannot be read: {error.strerror}; set the component's path to a file of "
            "tokens that every node can read"
        ) from error


def _digest_blocks(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        last = max(0, os.fstat(file.fileno()).st_size - DIGEST_BLOCK_BYTES)
        for block in range(DIGEST_BLOCKS):
            file.seek(block * last // (DIGEST_BLOCKS - 1))
            digest.update(file.read(DIGEST_BLOCK_BYTES))
    return digest.hexdigest()
