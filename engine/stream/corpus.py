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
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.stream.errors import StreamError
from engine.stream.tokens import TokenWindows

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257

# Tests hold deliberately broken text, and the others are not there in every installation.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)


class DocumentationText(TokenWindows):
    """Windows over the topics of Python's ``help()``, sorted by their keys."""

    def __init__(self, *, seq_len: int) -> None:
        from pydoc_data.topics import topics

        documents = (topics[key].encode("utf-8") for key in sorted(topics))
        super().__init__(join_documents(documents), seq_len=seq_len, source="python documentation")


class LibrarySources(TokenWindows):
    """Windows over the standard library's sources, sorted by their relative paths."""

    def __init__(self, *, seq_len: int) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        documents = (_read(root / path) for path in _source_paths(root))
        super().__init__(
            join_documents(documents), seq_len=seq_len, source="python library sources"
        )


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
