"""Export: a checkpoint's weights as a directory that `from_pretrained` reads.

Slices of all ranks are copied to their places in the output files window by window, so memory does
not grow with the model, its ranks, or the output shards. The work is done in a hidden sibling of
the output, which gets the final name by one rename when everything in it is durable. An export that
was interrupted leaves that sibling; the same command takes up its finished shards again, and starts
anew if they are of another save or made with other options. One process, no torch.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.exchange import companions, shards
from engine.exchange.checkpoint import Piece, StoredWeights, read_at
from engine.exchange.convert import FLOATING, Convert, converter
from engine.exchange.errors import ExchangeError
from engine.exchange.shards import OutputShard
from engine.format.dtypes import ITEMSIZE
from engine.protocol import files
from engine.protocol.files import Renamed

RECORD_NAME = "everstep_export.json"
"""Names the save and the options that an export was made from; stays beside the weights."""

AS_TRAINED = "as-trained"
DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
WINDOW_BYTES = 1 << 20  # with its conversion, it fits a core's cache

_PARTIAL = ".partial"
_MODE = 0o666  # less the umask: an export is for others to read
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Options:
    """What an export is to be.

    dtype        one of `DTYPES`, for all parameters; or `AS_TRAINED`, each in its training dtype.
                 Buffers keep their own
    shard_bytes  the most bytes of weights in a file
    full         whether to compare the digests of what is read
    tokenizer    directory to copy a tokenizer's files from; the recorded one if None
    """

    dtype: str = AS_TRAINED
    shard_bytes: int = 5 * 10**9
    full: bool = True
    tokenizer: str | None = None


class Export:
    """One export of an open checkpoint to the directory `out`.

    Attributes:
        shards: the files to be written.
        notes: what people should know: what is missing beside the weights.
        kept: finished files of an interrupted export that were kept.
    """

    def __init__(self, stored: StoredWeights, out: str, options: Options) -> None:
        self._stored, self._options = stored, options
        self._out = os.path.abspath(out)
        parent, name = os.path.split(self._out)
        self._work = os.path.join(parent, f".{name}.exporting")
        dtypes = [
            DTYPES.get(options.dtype, weight.training)
            if weight.sliced and weight.training in FLOATING
            else weight.training
            for weight in stored.weights
        ]
        self.shards = shards.plan_shards(stored.weights, dtypes, options.shard_bytes)
        of_parameters = [dtypes[i] for i, weight in enumerate(stored.weights) if weight.sliced]
        self._companions = companions.companions_of(
            stored.manifest, of_parameters, options.tokenizer
        )
        self.notes = self._companions.notes
        self.kept: list[str] = []

    @property
    def work_bytes(self) -> int:
        """Bytes that `run` will read for their digests and write."""
        written = sum(shard.plan.size_bytes for shard in self.shards)
        return written + (self._stored.size_bytes if self._options.full else 0)

    def run(self, progress: Progress | None = None) -> None:
        """Do it. Blocks until everything is durable under the final name.

        Args:
            progress: called with the bytes done since its last call, `work_bytes` in all.

        Raises:
            DamagedError: a shard of the checkpoint is damaged; nothing was written.
            ExchangeError: the output is in the way, or cannot be written.
        """
        self._refuse_existing()
        self._stored.check(full=self._options.full, progress=progress)
        try:
            with _locked(self._work):
                self._run(progress or _silent)
        except OSError as error:
            raise ExchangeError(
                f"{self._work}: {error.strerror}. What is finished there is kept: give the same "
                "command again once there is room, or delete that directory"
            ) from error

    def _run(self, progress: Progress) -> None:
        self._take_up()
        for shard in self.shards:
            if shard.name in self.kept:
                progress(shard.plan.size_bytes)
            else:
                self._write(shard, progress)
        if len(self.shards) > 1:
            self._put(shards.INDEX_NAME, shards.index_json(self.shards))
        for name, document in self._companions.documents.items():
            text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
            self._put(name, text.encode())
        for path in self._companions.copies:
            with open(path, "rb") as source:
                self._put(os.path.basename(path), source.read())
        self._refuse_existing()
        if files.rename_new(self._work, self._out) is not Renamed.DONE:
            raise ExchangeError(f"{self._out}: appeared meanwhile; the export is in {self._work}")
        files.fsync_directory(os.path.dirname(self._out))

    def _refuse_existing(self) -> None:
        if os.path.lexists(self._out):
            raise ExchangeError(
                f"--out {self._out}: is there already. Delete it, or export to another directory"
            )

    def _take_up(self) -> None:
        """Keep the finished shards of an interrupted export of this very kind; delete others."""
        manifest = self._stored.manifest
        record = {
            "save_id": manifest.save_id,
            "step": manifest.step,
            "sample_offset": manifest.sample_offset,
            "dtype": self._options.dtype,
            "shard_bytes": self._options.shard_bytes,
        }
        wanted = json.dumps(record, indent=2).encode() + b"\n"
        sizes = {shard.name: shard.plan.size_bytes for shard in self.shards}
        same = files.read_listed(self._path(RECORD_NAME)) == wanted
        for name in os.listdir(self._work):
            path = self._path(name)
            if same and name in sizes and os.path.getsize(path) == sizes[name]:
                self.kept.append(name)
            elif not same or name != RECORD_NAME:
                os.unlink(path)
        if not same:
            self._put(RECORD_NAME, wanted)

    def _write(self, shard: OutputShard, progress: Progress) -> None:
        """Write one output file durably; it has its name when it is whole."""
        partial = self._path(shard.name + _PARTIAL)
        metadata = {"format": "pt", "save_id": self._stored.manifest.save_id}
        header = shard.plan.header_bytes(metadata)
        target = os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, _MODE)
        try:
            os.ftruncate(target, shard.plan.size_bytes)
            _write_at(target, memoryview(header), 0)
            progress(len(header))
            for rank in range(self._stored.manifest.world_size):
                source = self._stored.open_shard(rank)
                try:
                    for piece in self._stored.pieces(rank, shard.indices):
                        self._copy(shard, piece, source, target, progress)
                finally:
                    os.close(source)
            os.fsync(target)
        finally:
            os.close(target)
        os.rename(partial, self._path(shard.name))
        files.fsync_directory(self._work)

    def _copy(
        self, shard: OutputShard, piece: Piece, source: int, target: int, progress: Progress
    ) -> None:
        weight = self._stored.weights[piece.index]
        dtype = shard.dtypes[piece.index - shard.indices.start]
        convert: Convert = converter(weight.name, weight.stored, dtype)
        at = shard.plan.spans[weight.name][0] + piece.first * ITEMSIZE[dtype]
        for begin in range(piece.begin, piece.end, WINDOW_BYTES):
            end = min(begin + WINDOW_BYTES, piece.end)
            converted = convert(read_at(source, begin, end))
            _write_at(target, converted, at)
            at += len(converted)
            progress(len(converted))

    def _put(self, name: str, data: bytes) -> None:
        files.write_durably(self._path(name), data, _MODE)

    def _path(self, name: str) -> str:
        return os.path.join(self._work, name)


def _silent(count: int) -> None:
    """Show no progress."""


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Make `directory` and hold it against a second export to the same place."""
    os.makedirs(directory, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ExchangeError(f"{directory}: another export is at work there") from error
        yield
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count
