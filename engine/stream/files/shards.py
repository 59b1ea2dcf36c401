"""Many files as one sequence of tokens: shards behind each other.

Windows run across them, and no file's tail is lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from engine.stream.errors import StreamError
from engine.stream.files import mapped
from engine.stream.files.ended import Ended
from engine.stream.files.shard import Shard, document_at
from engine.stream.source import Piece, Tokens, TokenSource


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
        self._ends = list(accumulate(shard.size for shard in shards))
        self.size = self._ends[-1]
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
        number = bisect_right(self._ends, begin)
        parts = []
        while begin < end:
            shard, last = self._shards[number], self._ends[number]
            before = last - shard.size
            if begin < last:
                self._watches[number].check()
                parts.append((shard, begin - before, min(end, last) - before))
            begin, number = max(begin, last), number + 1
        return parts


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
