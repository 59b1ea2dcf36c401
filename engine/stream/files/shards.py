"""Many files as one sequence of tokens, with the documents in them.

A `Shard` is a stretch of tokens in one file. `ShardedTokens` puts shards behind each other, so that
windows run across them and no file's tail is lost. `Ended` puts an end-of-document token after each
document of data that has none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.stream.errors import StreamError
from engine.stream.files import mapped
from engine.stream.source import Piece, Tokens, TokenSource


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


class Ended:
    """A shard with one more token after each of its documents.

    Raises:
        StreamError: the shard does not know its documents, or its type cannot hold the token.
    """

    def __init__(self, shard: Shard, token: int, component: str) -> None:
        if shard.documents is None:
            raise StreamError(
                f"component {component!r}: {shard.path}: end_of_document is set, but the file does "
                "not say where its documents end; leave end_of_document unset"
            )
        largest = int(np.iinfo(shard.dtype).max)
        if not 0 <= token <= largest:
            raise StreamError(
                f"component {component!r}: end_of_document={token}: wanted 0 to {largest}, which "
                f"is what {shard.dtype.name} holds"
            )
        self.path = shard.path
        self.dtype = shard.dtype
        self.documents = shard.documents
        self.first_document = shard.first_document
        self.size = shard.size + shard.documents
        self._shard = shard
        self._token = token

    def begins(self) -> Begins:
        """Return the documents' begins, each later by the tokens that were put before it."""
        return _Shifted(self._shard.begins())

    def read(self, begin: int, end: int) -> Tokens:
        """Return the tokens of ``[begin, end)``."""
        inner, begins = self._shard.begins(), self.begins()
        tokens = np.empty(end - begin, dtype=self.dtype)
        number, at = document_at(begins, begin), begin
        while at < end:
            end_token = int(begins[number + 1]) - 1
            stop = min(end, end_token)
            if at < stop:
                shift = int(inner[number]) - int(begins[number])
                tokens[at - begin : stop - begin] = self._shard.read(at + shift, stop + shift)
            if stop < end:
                tokens[stop - begin] = self._token
            at, number = stop + 1, number + 1
        return tokens

    def place(self, position: int) -> str:
        """Say for people where a token is in the file, or after which document it was put."""
        begins = self.begins()
        number = document_at(begins, position)
        if position + 1 == int(begins[number + 1]):
            return f"the end of document {self.first_document + number} of {self.path}"
        return self._shard.place(position - number)


class _Shifted:
    """Document begins of which the n-th is n later."""

    def __init__(self, begins: Begins) -> None:
        self._begins = begins

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, number: int) -> int:
        return int(self._begins[number]) + number


class ShardedTokens(TokenSource):
    """Shards behind each other.

    Args:
        shards: all of one dtype.
        files: what the fingerprint digests.
        kind: the format's name, for the fingerprint.
        component: the component's name, for errors.
        path: what the component's path is set to, for errors.
        end_of_document: a token to put after each document; see `Ended`.
        details: what else the fingerprint holds.

    Raises:
        StreamError: there are no shards, their dtypes differ, or the token cannot be put.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        files: Sequence[Path],
        kind: str,
        component: str,
        path: str | Path,
        end_of_document: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        self.name = f"component {component!r}: {path}"
        if not shards:
            raise StreamError(f"{self.name}: holds no tokens")
        self._details = dict(details or {})
        if end_of_document is not None:
            shards = [Ended(shard, end_of_document, component) for shard in shards]
            self._details["end_of_document"] = end_of_document
        self.dtype = shards[0].dtype
        for shard in shards:
            if shard.dtype != self.dtype:
                raise StreamError(
                    f"{self.name}: {shards[0].path} holds {self.dtype.name} and {shard.path} "
                    f"{shard.dtype.name}; wanted one dtype in all files of a component"
                )
        self._shards = shards
        watches = {shard.path: mapped.Watch(shard.path, component) for shard in shards}
        self._watches = [watches[shard.path] for shard in shards]
        self._ends = np.cumsum([shard.size for shard in shards], dtype=np.int64)
        self.size = int(self._ends[-1])
        self._files = files
        self._kind = kind

    def read(self, begin: int, end: int) -> Tokens:
        """Return the tokens of ``[begin, end)``; a view, where they are in one shard."""
        parts = [shard.read(first, last) for shard, first, last in self._parts(begin, end)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """Return the parts of documents that ``[begin, end)`` is made of, in order."""
        return [
            piece
            for shard, first, last in self._parts(begin, end)
            for piece in _pieces(shard, first, last)
        ]

    def place(self, position: int) -> str:
        """Say for people where one token is: which file, which byte or row."""
        ((shard, begin, _),) = self._parts(position, position + 1)
        return shard.place(begin)

    def fingerprint(self) -> dict[str, Any]:
        """Return kind, sizes, dtype and a digest of some blocks, as JSON."""
        return {
            "kind": self._kind,
            "tokens": self.size,
            "dtype": self.dtype.name,
            **self._details,
            **mapped.digest_blocks(self._files),
        }

    def _parts(self, begin: int, end: int) -> list[tuple[Shard, int, int]]:
        """Return the shards of a range that is not empty, and the range in each."""
        number = int(np.searchsorted(self._ends, begin, side="right"))
        parts = []
        while begin < end:
            shard, last = self._shards[number], int(self._ends[number])
            before = last - shard.size
            if begin < last:
                self._watches[number].check()
                parts.append((shard, begin - before, min(end, last) - before))
            begin, number = max(begin, last), number + 1
        return parts


def document_at(begins: Begins, position: int) -> int:
    """Return the number of the document that holds a position. Looks at log2(documents) begins."""
    return bisect_right(begins, position) - 1


def _pieces(shard: Shard, begin: int, end: int) -> list[Piece]:
    if shard.documents is None:
        return [Piece(str(shard.path), None, begin, end)]
    begins, found = shard.begins(), []
    number = document_at(begins, begin)
    while begin < end:
        first, last = int(begins[number]), min(end, int(begins[number + 1]))
        if begin < last:
            document = shard.first_document + number
            found.append(Piece(str(shard.path), document, begin - first, last - first))
        begin, number = last, number + 1
    return found
