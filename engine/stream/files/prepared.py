"""What ``everstep-data prepare`` says about the tokens that it made: ``prepared.json`` beside them.

It names the tokenizer (whose file is beside it, too), so that tokens can be shown as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from engine.stream.byte_tokens import END_MARK, decode_bytes

NAME = "prepared.json"
TOKENIZER_NAME = "tokenizer.json"

Decode = Callable[[npt.NDArray[Any]], str]


def write(folder: Path, described: dict[str, Any]) -> None:
    """Write a folder's description."""
    text = json.dumps(described, indent=2, sort_keys=True) + "\n"
    (folder / NAME).write_text(text, encoding="utf-8")


def read(folder: Path) -> dict[str, Any] | None:
    """Return a folder's description, or None if it has none that can be read."""
    try:
        described = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return described if isinstance(described, dict) else None


def decoder(folder: Path) -> Decode | None:
    """Return what turns a folder's tokens into text; None if they are of no known tokenizer."""
    described = read(folder) or {}
    if described.get("kind") == "bytes":
        return decode_bytes
    if described.get("kind") != "tokenizers":
        return None
    try:
        import tokenizers
    except ImportError:
        return None
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_NAME))
    end = described.get("end_of_document")

    def decode(tokens: npt.NDArray[Any]) -> str:
        documents: list[list[int]] = [[]]
        for token in tokens.tolist():
            documents.append([]) if token == end else documents[-1].append(token)
        return END_MARK.join(tokenizer.decode(one, skip_special_tokens=False) for one in documents)

    return decode
