"""Text that every machine with Python already has, as byte-level tokens.

`DocumentationText` is the language reference of ``help()`` (``pydoc_data.topics``),
`LibrarySources` the source files of the standard library. A token is a byte, and `END_OF_DOCUMENT`
follows each document; no tokenizer, no download. Both are held whole, as uint16: about 1 MB and
22 MB.

Another version of Python has other texts: a run that resumes under one is told so by the
fingerprint.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.stream.byte_tokens import END_OF_DOCUMENT, decode_bytes
from engine.stream.errors import StreamError
from engine.stream.source import MemoryTokens
from engine.stream.tokens import Windows

# Tests hold deliberately broken text, and the others are not there in every installation.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)


class ByteWindows(Windows):
    """Windows over texts as bytes.

    Args:
        documents: the texts; read once.
        names: of the documents, in the same order.
        seq_len: tokens per sample.
        source: what the texts are, for errors and as the fingerprint's kind.
    """

    def __init__(
        self, documents: Iterable[bytes], names: Sequence[str], *, seq_len: int, source: str
    ) -> None:
        tokens = join_documents(documents)
        ends = np.flatnonzero(tokens == END_OF_DOCUMENT) + 1
        super().__init__(MemoryTokens(tokens, source, ends=ends, documents=names), seq_len=seq_len)

    def decode(self, tokens: npt.NDArray[Any]) -> str:
        """Return tokens as text."""
        return decode_bytes(tokens)


class DocumentationText(ByteWindows):
    """Windows over the topics of Python's ``help()``, sorted by their keys."""

    def __init__(self, *, seq_len: int) -> None:
        from pydoc_data.topics import topics

        names = sorted(topics)
        documents = (topics[name].encode("utf-8") for name in names)
        super().__init__(documents, names, seq_len=seq_len, source="python documentation")


class LibrarySources(ByteWindows):
    """Windows over the standard library's sources, sorted by their relative paths."""

    def __init__(self, *, seq_len: int) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        names = _source_paths(root)
        documents = (_read(root / name) for name in names)
        super().__init__(documents, names, seq_len=seq_len, source="python library sources")


def join_documents(documents: Iterable[bytes]) -> npt.NDArray[np.uint16]:
    """Concatenate documents as byte tokens, each followed by `END_OF_DOCUMENT`."""
    parts = list(documents)
    tokens = np.empty(sum(len(part) + 1 for part in parts), dtype=np.uint16)
    end = 0
    for part in parts:
        begin, end = end, end + len(part) + 1
        tokens[begin : end - 1] = np.frombuffer(part, dtype=np.uint8)
        tokens[end - 1] = END_OF_DOCUMENT
    return tokens


def _source_paths(root: Path) -> list[str]:
    return sorted(_walk(root), key=lambda path: path.split("/"))


def _walk(root: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise StreamError(f"python library sources: cannot list {error.filename}") from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in files:
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StreamError(f"python library sources: cannot read {path}: {error}") from error
