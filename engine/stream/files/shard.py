"""A stretch of tokens in one file, with the documents in it.

The documents' begins are never gone through: the one that holds a position is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.stream.source import Tokens


class Begins(Protocol):
    """Where each document of a shard begins, in tokens, and at last where the last one ends."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class Shard(Protocol):
    """A stretch of tokens in one file.

    Attributes:
        path: the file.
        size: tokens.
        dtype: of the tokens.
        documents: how many; None where the format keeps no boundaries.
        first_document: the number that the file gives to the shard's first document.
    """

    @property
    def path(self) -> Path: ...
    @property
    def size(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def documents(self) -> int | None: ...
    @property
    def first_document(self) -> int: ...

    def begins(self) -> Begins:
        """Return the documents' begins, where there are documents."""

    def read(self, begin: int, end: int) -> Tokens:
        """Return the tokens of ``[begin, end)``, which must be inside. May be a view."""

    def place(self, position: int) -> str:
        """Say for people where a token is in the file."""


class ArrayShard:
    """A shard whose tokens are an array, mapped from a file.

    Args:
        path: the file.
        tokens: the array.
        byte_offset: where in the file it begins; None where that says nothing to people.
        begins: see `Shard.begins`; None where the format keeps no boundaries.
        first_document: see `Shard`.
    """

    def __init__(
        self,
        path: Path,
        tokens: Tokens,
        *,
        byte_offset: int | None = 0,
        begins: Begins | None = None,
        first_document: int = 0,
    ) -> None:
        self.path = path
        self.size = int(tokens.size)
        self.dtype = tokens.dtype
        self.documents = None if begins is None else len(begins) - 1
        self.first_document = first_document
        self._tokens = tokens
        self._byte_offset = byte_offset
        self._begins = begins

    def begins(self) -> Begins:
        """Return the documents' begins, where there are documents."""
        assert self._begins is not None
        return self._begins

    def read(self, begin: int, end: int) -> Tokens:
        """Return a view of the tokens of ``[begin, end)``."""
        return self._tokens[begin:end]

    def place(self, position: int) -> str:
        """Say for people where a token is in the file."""
        if self._byte_offset is not None:
            byte = self._byte_offset + position * self.dtype.itemsize
            return f"byte {byte} of {self.path}"
        if self._begins is not None:
            row = self.first_document + document_at(self._begins, position)
            return f"row {row} of {self.path}"
        return f"token {position} of {self.path}"


def document_at(begins: Begins, position: int) -> int:
    """Return the number of the document that holds a position. Looks at log2(documents) begins."""
    return bisect_right(begins, position) - 1
