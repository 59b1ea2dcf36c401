"""Columns of tokens in Arrow's types: lists of integers, one document a row. Needs pyarrow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.stream.errors import StreamError
from engine.stream.files.shard import Shard
from engine.stream.files.shards import ShardedTokens
from engine.stream.source import Tokens
from engine.stream.tokens import Windows


class ColumnTokens(Windows, ABC):
    """Windows over a column of tokens, the rows behind each other.

    Args:
        path: of the data; see the class of each format.
        seq_len: tokens per sample.
        component: the component's name, for errors.
        column: which column has the tokens, as lists of integers.
        end_of_document: a token to put after each row, if rows do not end in one.
        vocab_size: if given, a token that is not below it is an error.

    Raises:
        StreamError: pyarrow is missing, or a file is; a file is torn; the column is not there or
            does not hold lists of integers.
    """

    kind: ClassVar[str]
    source_class: ClassVar[type[ShardedTokens]] = ShardedTokens

    def __init__(
        self,
        path: str | Path,
        *,
        seq_len: int,
        component: str,
        column: str = "input_ids",
        end_of_document: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        files, shards = self._open(Path(path), column, component)
        source = self.source_class(
            shards,
            files=files,
            kind=self.kind,
            component=component,
            path=path,
            end_of_document=end_of_document,
            details={"column": column},
        )
        super().__init__(source, seq_len=seq_len, vocab_size=vocab_size)

    @staticmethod
    @abstractmethod
    def _open(path: Path, column: str, component: str) -> tuple[Sequence[Path], Sequence[Shard]]:
        """Return the files, and the column's stretches in them."""


def load_pyarrow(component: str) -> Any:
    """Return the module pyarrow.

    Raises:
        StreamError: it is not installed; names the extra that has it.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise StreamError(
            f"component {component!r}: Arrow and Parquet files need pyarrow: install the extra, "
            "pip install 'everstep[hf]'"
        ) from error
    return pyarrow


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn what pyarrow raises about a file that is torn, damaged or something else into an error.

    Raises:
        StreamError: says what it is about.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, IndexError) as error:
        # ValueError: of names that are not UTF-8; IndexError: of columns that a group has not.
        raise StreamError(f"{what}: {error}") from error


def check_type(schema: Any, column: str, path: Path, component: str) -> np.dtype[Any]:
    """Return the dtype of a column's tokens.

    Raises:
        StreamError: there is no such column, or it does not hold lists of integers.
    """
    pyarrow = load_pyarrow(component)
    where = f"component {component!r}: {path}"
    if column not in schema.names:
        raise StreamError(
            f"{where}: has no column {column!r}; it has {', '.join(schema.names)}. Set column"
        )
    kind = schema.field(column).type
    types = pyarrow.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not lists or not types.is_integer(kind.value_type):
        hint = " Text becomes tokens by everstep-data prepare" if types.is_string(kind) else ""
        raise StreamError(
            f"{where}: column {column!r} holds {kind}, wanted lists of integers.{hint}"
        )
    dtype: np.dtype[Any] = np.dtype(kind.value_type.to_pandas_dtype())
    return dtype


def flatten(lists: Any, column: str, where: str) -> tuple[Tokens, Tokens]:
    """Return an array of lists as tokens, without a copy where it can be, and the rows' begins.

    Raises:
        StreamError: there is a null among the tokens.
    """
    from pyarrow import compute

    lists.validate(full=True)  # a damaged file's offsets may point anywhere
    values = lists.flatten()
    if values.null_count:
        raise StreamError(f"{where}: column {column!r} has {values.null_count} nulls among tokens")
    lengths = compute.list_value_length(lists).fill_null(0)
    begins = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum(lengths.to_numpy(zero_copy_only=False), out=begins[1:])
    return values.to_numpy(zero_copy_only=True), begins
