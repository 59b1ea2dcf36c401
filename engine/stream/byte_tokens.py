"""Bytes as tokens: a token is a byte, and one more token ends a document. Needs no tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257

END_MARK = "<|end of document|>"


def decode_bytes(tokens: npt.NDArray[Any]) -> str:
    """Return tokens as text; the ends of documents, and what is not UTF-8, as marks."""
    ends = np.flatnonzero(tokens == END_OF_DOCUMENT)
    parts = np.split(tokens, ends)
    texts = [
        (part[1:] if number else part).astype(np.uint8).tobytes().decode("utf-8", "replace")
        for number, part in enumerate(parts)
    ]
    return END_MARK.join(texts)
