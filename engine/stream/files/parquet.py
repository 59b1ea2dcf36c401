"""Parquet files with a column of tokens. Needs pyarrow.

Parquet is compressed, so it cannot be mapped: a window's row groups are decoded when it is read,
and the last few are kept. That is slow in random order. ``everstep-data prepare`` makes a token
file of it once, which is not.

How many tokens a row group has is taken from the file's footer, without decoding, which is right as
long as no row is empty or null; where that turns out untrue, reading says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.stream.errors import StreamError
from engine.stream.files import columns, mapped
from engine.stream.files.shard import document_at
from engine.stream.files.shards import ShardedTokens
from engine.stream.source import Tokens, spread

KEPT_ROW_GROUPS = 4


class _Decoded(ShardedTokens):
    def sampled_ranges(self) -> Any:
        """Yield head and tail alone: what is between them costs a row group each."""
        yield from spread(self.size, 2, 1)


class ParquetTokens(columns.ColumnTokens):
    """Windows over Parquet files; the arguments are those of `ColumnTokens`.

    `path` is a file, or a folder of ``.parquet`` files, taken in the order of their paths.
    """

    kind = "parquet tokens"
    source_class = _Decoded

    @staticmethod
    def _open(path: Path, column: str, component: str) -> tuple[list[Path], list[_RowGroup]]:
        files = mapped.find(path, (".parquet",), component)
        opened = [_File(file, column, component) for file in files]
        return files, [shard for file in opened for shard in file.row_groups]


class _File:
    """One open file, and the row groups of it that were decoded last."""

    def __init__(self, path: Path, column: str, component: str) -> None:
        columns.load_pyarrow(component)
        from pyarrow import parquet

        self.path = path
        self.where = f"component {component!r}: {path}"
        self._column = column
        mapped.size_of(path, component)
        with columns.refusing(f"{self.where}: is torn, or not Parquet"):
            self._file = parquet.ParquetFile(path, memory_map=True)
            self.dtype = columns.check_type(self._file.schema_arrow, column, path, component)
            self.row_groups = list(self._row_groups())
        self.decode = lru_cache(KEPT_ROW_GROUPS)(self._decode)

    def _row_groups(self) -> Iterator[_RowGroup]:
        metadata, first_row = self._file.metadata, 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            leaves = [
                group.column(leaf)
                for leaf in range(group.num_columns)
                if group.column(leaf).path_in_schema.split(".")[0] == self._column
            ]
            yield _RowGroup(self, number, leaves[0].num_values, group.num_rows, first_row)
            first_row += group.num_rows

    def _decode(self, number: int) -> tuple[Tokens, Tokens]:
        import pyarrow

        with columns.refusing(f"{self.where}: row group {number} cannot be read"):
            # One thread: a loader's worker is a fork, and has not its parent's.
            table = self._file.read_row_group(number, columns=[self._column], use_threads=False)
            lists = table.column(self._column).combine_chunks()
            if isinstance(lists, pyarrow.ChunkedArray):
                lists = lists.chunk(0)
            return columns.flatten(lists, self._column, self.where)


class _RowGroup:
    """A row group as a shard that is decoded when it is read."""

    def __init__(self, file: _File, number: int, size: int, rows: int, first_row: int) -> None:
        self._file = file
        self._number = number
        self.size = size
        self.documents = rows
        self.first_document = first_row

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._file.dtype

    def begins(self) -> Tokens:
        """Return where the rows begin. Decodes the row group."""
        return self._decode()[1]

    def read(self, begin: int, end: int) -> Tokens:
        """Return the tokens of ``[begin, end)``. Decodes the row group."""
        return self._decode()[0][begin:end]

    def place(self, position: int) -> str:
        """Say for people where a token is in the file."""
        return f"row {self.first_document + document_at(self.begins(), position)} of {self.path}"

    def _decode(self) -> tuple[Tokens, Tokens]:
        tokens, begins = self._file.decode(self._number)
        if tokens.size != self.size:
            raise StreamError(
                f"{self._file.where}: row group {self._number} has {tokens.size} tokens where the "
                f"file's footer says {self.size}: some of its rows are empty or null; make a token "
                "file of it by everstep-data prepare"
            )
        return tokens, begins
