"""Documents in files: found in a fixed order, split into spans, read one by one.

A plain text file is one document, or one a line. A file of JSON lines (``.jsonl``, ``.ndjson``) has
one a line. Both may be compressed by gzip (``.gz``). A Parquet file has one a row. A span is a part
of a file that can be read alone: a range of bytes, to which the lines belong that begin in it, or a
row group.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from engine.prepare.errors import InputError, PrepareError, UsageError

JSON_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
GZIP_SUFFIX = ".gz"
FOLDER_SUFFIXES = (".txt", ".md", *JSON_SUFFIXES, PARQUET_SUFFIX)

_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class File:
    """An input file as it was found; it must not change while it is being read."""

    path: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True)
class Span:
    """A part of a file: bytes ``[begin, end)``, or of Parquet, row groups."""

    path: str
    begin: int
    end: int
    cost_bytes: int


@dataclass(frozen=True)
class Reading:
    """How documents are taken from files.

    Attributes:
        field: the key in JSON lines, or the column of Parquet, that holds the document.
        text_lines: a plain text file has a document a line, instead of one in all.
        replace_invalid: what is not UTF-8 becomes U+FFFD, instead of stopping the tool.
    """

    field: str
    text_lines: bool
    replace_invalid: bool


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        content: bytes of plain text, a string, or a list of tokens.
        where: its file and place, for errors.
        cost_bytes: of the file, for the progress bar; 0 where that is not known.
    """

    content: bytes | str | list[int]
    where: str
    cost_bytes: int


def find(inputs: Iterable[str], suffixes: Sequence[str] = FOLDER_SUFFIXES) -> list[File]:
    """Return all files: inputs in their order, folders walked in order of names.

    Args:
        inputs: files, which are taken whatever their names, and folders.
        suffixes: of the files that are taken from folders; each may be followed by ``.gz``. Names
            that begin with a dot are passed over.

    Raises:
        UsageError: an input is not there, or a folder has no such file.
    """
    endings = tuple(suffix + packed for suffix in suffixes for packed in ("", GZIP_SUFFIX))
    paths: list[Path] = []
    for text in inputs:
        root = Path(text)
        if root.is_dir():
            below = [
                path
                for path in root.rglob("*")
                if path.name.endswith(endings)
                and path.is_file()
                and not any(part.startswith(".") for part in path.relative_to(root).parts)
            ]
            if not below:
                raise UsageError(f"{text}: no file in this folder ends in {' or '.join(suffixes)}")
            paths += sorted(below, key=lambda path, root=root: path.relative_to(root).parts)  # type: ignore[misc]
        elif root.is_file():
            paths.append(root)
        else:
            raise UsageError(f"{text}: there is no such file or folder")
    return [describe(str(path)) for path in paths]


def describe(path: str) -> File:
    """Return what tells a file from a changed one."""
    status = os.stat(path)
    return File(path, status.st_size, status.st_mtime_ns)


def spans(file: File, reading: Reading, span_bytes: int) -> list[Span]:
    """Split a file, if it is one that can be, into spans of about `span_bytes`."""
    if file.path.endswith(PARQUET_SUFFIX):
        groups: int = _parquet(file.path).metadata.num_row_groups
        cost = file.size_bytes // max(1, groups)
        return [Span(file.path, number, number + 1, cost) for number in range(groups)]
    lines = _is_json(file.path) or reading.text_lines
    if not lines or file.path.endswith(GZIP_SUFFIX):
        return [Span(file.path, 0, file.size_bytes, file.size_bytes)]
    found = []
    for begin in range(0, file.size_bytes, span_bytes):
        end = min(begin + span_bytes, file.size_bytes)
        found.append(Span(file.path, begin, end, end - begin))
    return found


def documents(span: Span, reading: Reading) -> Iterator[Document]:
    """Yield a span's documents. Empty ones are left out.

    Raises:
        InputError: a document is not what the file's name and `reading` say.
        PrepareError: pyarrow is needed, and missing.
    """
    if span.path.endswith(PARQUET_SUFFIX):
        found = _parquet_rows(span, reading.field)
    elif _is_json(span.path):
        found = _json_lines(span, reading)
    elif reading.text_lines:
        found = (
            Document(line.rstrip(b"\r\n"), f"{span.path}, byte {at}", cost)
            for at, line, cost in _lines(span)
        )
    else:
        found = _whole(span)
    yield from (document for document in found if len(document.content))


def _is_json(path: str) -> bool:
    return path.removesuffix(GZIP_SUFFIX).endswith(JSON_SUFFIXES)


def _open(path: str) -> IO[bytes]:
    packed = path.endswith(GZIP_SUFFIX)
    return cast("IO[bytes]", gzip.open(path, "rb") if packed else open(path, "rb"))


def _whole(span: Span) -> Iterator[Document]:
    with _open(span.path) as file:
        try:
            content = file.read()
        except (OSError, EOFError) as error:
            raise InputError(f"{span.path}: cannot be read: {error}") from error
    yield Document(content, span.path, span.cost_bytes)


def _lines(span: Span) -> Iterator[tuple[int, bytes, int]]:
    """Yield the lines that begin in the span, where each begins, and its bytes of the file."""
    compressed = span.path.endswith(GZIP_SUFFIX)
    with _open(span.path) as file:
        at = 0
        if span.begin:
            # Of the line that holds the byte before, the rest is the span before's.
            file.seek(span.begin - 1)
            at = span.begin - 1 + len(file.readline())
        try:
            while compressed or at < span.end:
                line = file.readline()
                if not line:
                    return
                yield at, line, 0 if compressed else len(line)
                at += len(line)
        except (OSError, EOFError) as error:
            raise InputError(f"{span.path}: cannot be read: {error}") from error


def _json_lines(span: Span, reading: Reading) -> Iterator[Document]:
    errors = "replace" if reading.replace_invalid else "strict"
    for at, line, cost in _lines(span):
        where = f"{span.path}, line at byte {at}"
        if not line.strip():
            continue
        try:
            record = json.loads(line.removeprefix(_UTF8_MARK).decode("utf-8", errors))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: is not a line of JSON in UTF-8: {error}") from error
        if not isinstance(record, dict) or reading.field not in record:
            has = f"it has {', '.join(record)}" if isinstance(record, dict) else "it is no object"
            raise InputError(f"{where}: has no field {reading.field!r} ({has}); set --field")
        content = record[reading.field]
        if not isinstance(content, (str, list)):
            raise InputError(
                f"{where}: field {reading.field!r} holds {type(content).__name__}, wanted text, or "
                "a list of tokens"
            )
        yield Document(content, where, cost)


def _parquet_rows(span: Span, field: str) -> Iterator[Document]:
    from pyarrow import ArrowException

    file = _parquet(span.path)
    if field not in file.schema_arrow.names:
        raise InputError(
            f"{span.path}: has no column {field!r}; it has {', '.join(file.schema_arrow.names)}; "
            "set --field"
        )
    first = sum(file.metadata.row_group(number).num_rows for number in range(span.begin))
    try:
        column = file.read_row_group(span.begin, columns=[field], use_threads=False).column(field)
    except (ArrowException, OSError) as error:
        raise InputError(f"{span.path}: row group {span.begin}: {error}") from error
    cost = span.cost_bytes // max(1, len(column))
    for row, value in enumerate(column, start=first):
        content = value.as_py()
        if content is not None:
            yield Document(content, f"{span.path}, row {row}", cost)


def _parquet(path: str) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise PrepareError(
            f"{path}: Parquet needs pyarrow: install the extra, pip install 'everstep[hf]'"
        ) from error
    try:
        return parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: is torn, or not Parquet: {error}") from error
