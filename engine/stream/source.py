"""A token source: one long sequence of tokens, read by ranges, that knows its documents.

`TokenSource` is what windows are cut from. `MemoryTokens` holds an array; the package `files` has
sources over files. A source finds the document of any position without reading the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Tokens = npt.NDArray[Any]

SAMPLED_RANGES = 64
SAMPLED_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a window that lies in one document.

    Attributes:
        file: where it is; None for text that is in no single file.
        document: the document's number in the file, from 0, or its name; None where the format
            keeps no boundaries.
        begin: the piece's first token, counted from the document's begin (from the file's, where
            there are no documents).
        end: one past its last token.
    """

    file: str | None
    document: int | str | None
    begin: int
    end: int


class TokenSource(ABC):
    """One sequence of tokens of an integer type.

    Attributes:
        name: what it is and where, for errors.
        size: tokens in all.
        dtype: of the tokens.
    """

    name: str
    size: int
    dtype: np.dtype[Any]

    @abstractmethod
    def read(self, begin: int, end: int) -> Tokens:
        """Return the tokens of ``[begin, end)``, which must be inside. May be a view."""

    @abstractmethod
    def pieces(self, begin: int, end: int) -> list[Piece]:
        """Return the parts of documents that ``[begin, end)`` is made of, in order."""

    @abstractmethod
    def place(self, position: int) -> str:
        """Say for people where one token is: which file, which byte."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return, as JSON, what changes when the tokens change. Cheap on large files."""

    def sampled_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges that a check at start reads: spread evenly, head and tail included."""
        yield from spread(self.size, SAMPLED_RANGES, SAMPLED_TOKENS)


class MemoryTokens(TokenSource):
    """Tokens in an array.

    Args:
        tokens: one-dimensional, of an integer type; kept, not copied.
        name: what they are.
        ends: where each document ends, in tokens; or nothing, if that is not known.
        documents: their names; numbers are used otherwise.
    """

    def __init__(
        self,
        tokens: Tokens,
        name: str,
        *,
        ends: Sequence[int] | Tokens = (),
        documents: Sequence[str] = (),
    ) -> None:
        self.tokens = tokens
        self.name = name
        self.size = int(tokens.size)
        self.dtype = tokens.dtype
        self._ends = ends
        self._documents = documents

    def read(self, begin: int, end: int) -> Tokens:
        """Return a view of the tokens of ``[begin, end)``."""
        return self.tokens[begin:end]

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """Return the parts of documents that ``[begin, end)`` is made of, in order."""
        if not len(self._ends):
            return [Piece(None, None, begin, end)]
        found = []
        number = bisect_right(self._ends, begin)
        while begin < end:
            first = int(self._ends[number - 1]) if number else 0
            last = min(end, int(self._ends[number]))
            document = self._documents[number] if self._documents else number
            found.append(Piece(None, document, begin - first, last - first))
            begin, number = last, number + 1
        return [piece for piece in found if piece.begin < piece.end]

    def place(self, position: int) -> str:
        """Say for people where one token is."""
        return f"token {position} of {self.name}"

    def fingerprint(self) -> dict[str, Any]:
        """Return kind, size, dtype and a digest of all tokens, as JSON."""
        return {
            "kind": self.name,
            "tokens": self.size,
            "dtype": self.dtype.name,
            "digest": xxhash.xxh3_128(self.tokens.data).hexdigest(),
        }


def spread(size: int, count: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of up to `length` inside ``[0, size)``: up to `count`, evenly, both ends.

    Ranges do not overlap: a small sequence is covered whole, once.
    """
    if size <= count * length:
        yield from ((begin, min(size, begin + length)) for begin in range(0, size, length))
        return
    last = size - length
    for part in range(count):
        begin = part * last // (count - 1)
        yield begin, begin + length
