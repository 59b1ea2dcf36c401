"""Token sequences as map-style data sets of overlapping windows.

`Windows` cuts one long sequence of tokens into samples of ``seq_len + 1`` tokens that overlap by
one, so that every token but the first is predicted exactly once per epoch. Windows are packed:
documents follow each other, and a window may begin in the middle of one. The data sets over files
are in the package `files`; `TokenWindows` is over an array.

Refused, by naming the component and the place: fewer tokens than a window, and a token outside the
vocabulary (in the model it would be an index out of range, which on an accelerator ends the
process without naming it). At the start a part of the tokens is looked at; every sample is when it
is read.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.stream.errors import StreamError
from engine.stream.source import MemoryTokens, Piece, Tokens, TokenSource

if TYPE_CHECKING:
    import torch


class Windows:
    """Windows over a token source.

    Args:
        source: kept, not copied.
        seq_len: tokens per sample.
        vocab_size: if given, tokens must be below it. They must be 0 or above in any case.

    Raises:
        StreamError: the tokens do not fill one window, or one that is looked at is not in the
            vocabulary.
    """

    draws_random_numbers = False

    def __init__(self, source: TokenSource, *, seq_len: int, vocab_size: int | None = None) -> None:
        if seq_len < 1:
            raise StreamError(f"{source.name}: seq_len must be 1 or more, found {seq_len}")
        if source.size < seq_len + 1:
            raise StreamError(
                f"{source.name}: holds {source.size} tokens, wanted at least seq_len + 1 = "
                f"{seq_len + 1}; give it more text, or lower seq_len"
            )
        self.source = source
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        if vocab_size is not None or source.dtype.kind == "i":
            for begin, end in source.sampled_ranges():
                self._check_vocabulary(source.read(begin, end), begin)

    def __len__(self) -> int:
        return (self.source.size - 1) // self.seq_len

    def read(self, index: int) -> Tokens:
        """Return the tokens of a window, of the source's type. May be a view.

        Raises:
            IndexError: there is no such window.
            StreamError: a token is not in the vocabulary.
        """
        begin, end = self._range(index)
        tokens = self.source.read(begin, end)
        self._check_vocabulary(tokens, begin)
        return tokens

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a window, int64 of ``[seq_len + 1]``."""
        return self.read(index).astype(np.int64)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels``, each int64 of ``[seq_len]``.

        ``labels[t]`` is the token after ``input_ids[t]``: they are shifted already.
        """
        import torch

        window = torch.from_numpy(self.window(index))
        return {"input_ids": window[:-1], "labels": window[1:]}

    def pieces(self, index: int) -> list[Piece]:
        """Return the parts of documents that a window is made of, in order."""
        return self.source.pieces(*self._range(index))

    def describe(self, index: int) -> dict[str, Any]:
        """Say, as JSON, what a window is: its range of the tokens, and its `pieces`."""
        begin, end = self._range(index)
        return {
            "window": index,
            "tokens": [begin, end],
            "pieces": [asdict(piece) for piece in self.source.pieces(begin, end)],
        }

    def decode(self, tokens: npt.NDArray[Any]) -> str | None:
        """Return tokens as text, or None where it is not known what they stand for."""
        return None

    def fingerprint(self) -> dict[str, Any]:
        """Return the source's fingerprint and the window's length, as JSON."""
        return {**self.source.fingerprint(), "seq_len": self.seq_len}

    def _range(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.source.name}: no window {index}, it has {len(self)}")
        begin = index * self.seq_len
        return begin, begin + self.seq_len + 1

    def _check_vocabulary(self, tokens: Tokens, begin: int) -> None:
        if self.vocab_size is not None and int(tokens.max()) >= self.vocab_size:
            self._refuse(tokens, begin, int(tokens.argmax()))
        if tokens.dtype.kind == "i" and int(tokens.min()) < 0:
            self._refuse(tokens, begin, int(tokens.argmin()))

    def _refuse(self, tokens: Tokens, begin: int, at: int) -> None:
        wanted = "0 or above" if self.vocab_size is None else f"0 to {self.vocab_size - 1}"
        raise StreamError(
            f"{self.source.name}: found token {int(tokens[at])} at "
            f"{self.source.place(begin + at)} (window {(begin + at) // self.seq_len}), wanted "
            f"{wanted}; is {self.source.dtype.name} what the file holds, and was it made with the "
            "model's tokenizer?"
        )


class TokenWindows(Windows):
    """Windows over an array of tokens.

    Args:
        tokens: one-dimensional, of an integer type; kept, not copied.
        seq_len: tokens per sample.
        source: what the tokens are, for errors and as the fingerprint's kind.

    Raises:
        StreamError: the tokens do not fill one window.
    """

    def __init__(self, tokens: npt.NDArray[Any], *, seq_len: int, source: str) -> None:
        super().__init__(MemoryTokens(tokens, source), seq_len=seq_len)
