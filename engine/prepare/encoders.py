"""Encoders: a document -> its tokens.

`bytes` needs nothing. A JSON file of Hugging Face's `tokenizers` needs that package. `tokens` is
for inputs that hold tokens already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from engine.prepare.errors import InputError, PrepareError, UsageError
from engine.prepare.inputs import Document
from engine.stream import byte_tokens

BYTES, TOKENS = "bytes", "tokens"

# What tokenizers of well-known models call the token between documents.
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")

Tokens = npt.NDArray[Any]


@dataclass(frozen=True)
class Choice:
    """Which encoder, as the arguments say.

    Attributes:
        tokenizer: "bytes", "tokens", or the path of a tokenizer's JSON file.
        end_of_document: the token that ends documents, by its text or its number; None for the
            tokenizer's usual one.
        vocab_size: of inputs that hold tokens already.
        replace_invalid: see `inputs.Reading`.
    """

    tokenizer: str
    end_of_document: str | None
    vocab_size: int | None
    replace_invalid: bool


class Encoder(ABC):
    """Turns documents into tokens.

    Attributes:
        vocab_size: every token is below it.
        end_of_document: what follows each document; None for nothing.
    """

    vocab_size: int
    end_of_document: int | None

    @abstractmethod
    def encode(self, document: Document) -> Tokens:
        """Return a document's tokens, of `dtype`, without the end.

        Raises:
            InputError: the document is of another kind than the encoder takes.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return, as JSON, what decides the tokens."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type that Megatron-Core stores such a vocabulary in."""
        return np.dtype("<u2") if self.vocab_size < 65500 else np.dtype("<i4")


def build(choice: Choice) -> Encoder:
    """Return the encoder that the arguments ask for.

    Raises:
        UsageError: they do not go together, or the tokenizer's file cannot be used.
        PrepareError: the package `tokenizers` is needed, and missing.
    """
    if choice.tokenizer != TOKENS and choice.vocab_size is not None:
        raise UsageError("--vocab-size goes with --tokenizer tokens; a tokenizer has its own")
    if choice.tokenizer == BYTES:
        if choice.end_of_document is not None:
            raise UsageError("--tokenizer bytes has its own end of document, 256")
        return Bytes()
    if choice.tokenizer == TOKENS:
        return Ready(choice)
    return TokenizerFile(choice)


class Bytes(Encoder):
    """A token is a byte of the UTF-8 text; 256 ends a document."""

    vocab_size = byte_tokens.VOCAB_SIZE
    end_of_document = byte_tokens.END_OF_DOCUMENT

    def encode(self, document: Document) -> Tokens:
        """Return the document's bytes."""
        return np.frombuffer(_utf8(document), np.uint8).astype(self.dtype)

    def identity(self) -> dict[str, Any]:
        """Return what decides the tokens."""
        return {"kind": BYTES}


class Ready(Encoder):
    """Tokens that are tokens already."""

    def __init__(self, choice: Choice) -> None:
        if choice.vocab_size is None:
            raise UsageError("--tokenizer tokens needs --vocab-size: the model's")
        self.vocab_size = choice.vocab_size
        end = choice.end_of_document
        if end is not None and not (end.isascii() and end.isdigit()):
            raise UsageError(f"--end-of-document {end}: of tokens it is a number")
        self.end_of_document = None if end is None else int(end)
        if self.end_of_document is not None and self.end_of_document >= self.vocab_size:
            raise UsageError(f"--end-of-document {end}: is not below --vocab-size")

    def encode(self, document: Document) -> Tokens:
        """Return the document's tokens, checked."""
        content = document.content
        whole = isinstance(content, list) and all(type(token) is int for token in content)
        if not whole:
            raise InputError(f"{document.where}: wanted a list of whole numbers")
        for token in content:
            if not 0 <= int(token) < self.vocab_size:
                raise InputError(
                    f"{document.where}: found token {token}, wanted 0 to {self.vocab_size - 1}"
                )
        return np.asarray(content, dtype=self.dtype)

    def identity(self) -> dict[str, Any]:
        """Return what decides the tokens."""
        return {"kind": TOKENS}


class TokenizerFile(Encoder):
    """A tokenizer's JSON file. Truncation, padding and special tokens that it asks for are off."""

    def __init__(self, choice: Choice) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise PrepareError(
                f"--tokenizer {choice.tokenizer}: needs the package tokenizers: install the extra, "
                "pip install 'everstep[hf]'"
            ) from error
        self.path = Path(choice.tokenizer)
        try:
            self.content = self.path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
        except OSError as error:
            raise UsageError(
                f"--tokenizer {self.path}: cannot be read: {error.strerror}; wanted bytes, tokens, "
                "or a tokenizer's JSON file"
            ) from error
        except Exception as error:  # tokenizers raises bare Exceptions
            raise UsageError(f"--tokenizer {self.path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = _end(choice, vocabulary, self._special_tokens())
        self._errors = "replace" if choice.replace_invalid else "strict"

    def encode(self, document: Document) -> Tokens:
        """Return the document's tokens."""
        try:
            text = _utf8(document).decode("utf-8", self._errors)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{document.where}: is not UTF-8 at byte {error.start} of the document; "
                "--replace-invalid goes on without it"
            ) from error
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=self.dtype)

    def identity(self) -> dict[str, Any]:
        """Return what decides the tokens."""
        return {"kind": "tokenizers", "digest": xxhash.xxh3_128(self.content).hexdigest()}

    def _special_tokens(self) -> Sequence[str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return [added[number].content for number in sorted(added) if added[number].special]


def _utf8(document: Document) -> bytes:
    content = document.content
    if isinstance(content, list):
        raise InputError(f"{document.where}: holds tokens, not text; --tokenizer tokens takes it")
    if isinstance(content, str):
        return content.encode("utf-8", "replace")  # of lone surrogates, which JSON may hold
    return content


def _end(choice: Choice, vocabulary: dict[str, int], special: Sequence[str]) -> int:
    if choice.end_of_document is not None:
        if choice.end_of_document not in vocabulary:
            raise UsageError(
                f"--end-of-document {choice.end_of_document}: the tokenizer has no such token; its "
                f"special tokens are {', '.join(special) or 'none'}"
            )
        return vocabulary[choice.end_of_document]
    usual = [token for token in USUAL_ENDS if token in vocabulary]
    if len(usual) != 1:
        raise UsageError(
            f"the tokenizer has {len(usual)} of the usual tokens that end documents; set "
            f"--end-of-document to one of its special tokens: {', '.join(special) or 'it has none'}"
        )
    return vocabulary[usual[0]]
