"""An end-of-document token after each document of data that has none. Made as it is read."""

from __future__ import annotations

import numpy as np

from engine.stream.errors import StreamError
from engine.stream.files.shard import Begins, Shard, document_at
from engine.stream.source import Tokens


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
