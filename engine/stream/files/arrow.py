"""Hugging Face data sets on disk: what ``Dataset.save_to_disk`` writes. Needs pyarrow.

A folder with ``state.json``, which lists the data files in their order, each an Arrow IPC *stream*.
The files are mapped, and tokens are read where they lie.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from engine.stream.errors import StreamError
from engine.stream.files import columns, mapped
from engine.stream.files.shard import ArrayShard

_STATE_LIMIT = 1 << 26


class HuggingFaceTokens(columns.ColumnTokens):
    """Windows over a saved data set; the arguments are those of `ColumnTokens`.

    `path` is the folder that ``save_to_disk`` made; of a ``DatasetDict``, one split's.
    """

    kind = "hugging face tokens"

    @staticmethod
    def _open(path: Path, column: str, component: str) -> tuple[list[Path], list[ArrayShard]]:
        files = _data_files(path, component)
        return files, [shard for file in files for shard in _batches(file, column, component)]


def _data_files(folder: Path, component: str) -> list[Path]:
    where = f"component {component!r}: {folder}"
    if (folder / "dataset_dict.json").exists():
        splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
        raise StreamError(f"{where}: holds the splits {', '.join(splits)}; set path to one of them")
    state_path = folder / "state.json"
    try:
        state = json.loads(mapped.read_head(state_path, _STATE_LIMIT, component))
        names = [entry["filename"] for entry in state["_data_files"]]
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("a file name has a folder in it")
    except (ValueError, KeyError, TypeError) as error:
        raise StreamError(
            f"component {component!r}: {state_path}: is not what save_to_disk writes: {error!r}"
        ) from error
    if state.get("_indices_data_files"):
        raise StreamError(
            f"{where}: was saved by an old version, with a selection of rows; call "
            "flatten_indices() on it and save it again"
        )
    if not names:
        raise StreamError(f"{where}: holds no data files")
    return [folder / name for name in names]


def _batches(path: Path, column: str, component: str) -> Iterator[ArrayShard]:
    """Yield a shard per record batch."""
    pyarrow = columns.load_pyarrow(component)
    from pyarrow import ipc

    mapped.size_of(path, component)
    where, first_row = f"component {component!r}: {path}", 0
    with (
        columns.refusing(f"{where}: is torn, or not an Arrow stream"),
        ipc.open_stream(pyarrow.memory_map(str(path))) as reader,
    ):
        columns.check_type(reader.schema, column, path, component)
        for batch in reader:
            tokens, begins = columns.flatten(batch.column(column), column, where)
            yield ArrayShard(
                path, tokens, byte_offset=None, begins=begins, first_document=first_row
            )
            first_row += batch.num_rows
