"""Read the weights of a committed checkpoint, whoever's ranks wrote it, a piece at a time.

The directory is opened once and everything is read relative to it. What is kept per rank is where
its slices begin, eight bytes a tensor: with hundreds of ranks, their headers would not fit beside a
model. Blocking; no torch.
"""

import math
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.exchange.errors import ExchangeError
from engine.format.directory import open_directory, open_file, read_manifest
from engine.format.dtypes import ITEMSIZE
from engine.format.errors import DamagedError
from engine.format.manifest import Manifest
from engine.format.partition import slice_of
from engine.format.shard import read_header
from engine.format.verify import verify_shard

_BUFFER = "buffer/"
_NAMED = 3


@dataclass(frozen=True)
class Weight:
    """One tensor of the model as the checkpoint stores it.

    name      as the model names it
    entry     name of its entries in the shards
    shape     of the whole tensor
    stored    dtype of the stored slices: of the master, or of a frozen weight or buffer itself
    training  dtype that the model trains it in
    sliced    True for a parameter, of which every rank has a slice; False for a buffer, which every
              rank has whole
    """

    name: str
    entry: str
    shape: tuple[int, ...]
    stored: str
    training: str
    sliced: bool

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Bytes of one weight in one rank's shard.

    index        of the weight
    first        number of its first element in the flattened weight
    begin, end   bytes of the shard
    """

    index: int
    first: int
    begin: int
    end: int


class StoredWeights:
    """A committed checkpoint, open for reading its weights. A context manager.

    Attributes:
        manifest: of the checkpoint.
        weights: parameters in layout order, then frozen ones, then persistent buffers.
    """

    def __init__(self, path: str, *, whole: bool = True) -> None:
        """Open the checkpoint at `path` and read its manifest.

        Args:
            whole: refuse a checkpoint that was saved without its frozen weights; else `weights`
                has those that it holds.

        Raises:
            FormatError: the manifest is damaged.
            ExchangeError: it cannot be opened, or does not hold all weights.
        """
        self.path = path
        try:
            self._dir_fd = open_directory(path)
        except OSError as error:
            raise ExchangeError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self.manifest: Manifest = read_manifest(self._dir_fd, path)
            if whole:
                _require_frozen(self.manifest, path)
        except BaseException as error:
            os.close(self._dir_fd)
            if isinstance(error, OSError):
                raise ExchangeError(f"{path}: its manifest: {error.strerror}") from error
            raise
        self.weights = tuple(_weights_of(self.manifest))
        self._begins: list[array[int]] = []

    def __enter__(self) -> "StoredWeights":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._dir_fd)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards: what `check` reads, if it is to read all."""
        return sum(shard.size_bytes for shard in self.manifest.shards)

    def check(self, *, full: bool, progress: Callable[[int], None] | None = None) -> None:
        """Check every shard, and learn where its slices lie. Call it before `pieces`.

        Args:
            full: read every byte and compare digests; else sizes and headers only.
            progress: called with the bytes read since its last call.

        Raises:
            DamagedError: names every damaged shard.
            ExchangeError: the checkpoint was removed meanwhile, as retention does.
        """
        problems = []
        for rank in range(self.manifest.world_size):
            found = verify_shard(
                self._dir_fd, self.path, self.manifest, rank, full=full, progress=progress
            )
            problems += found
            if not found:
                self._begins.append(self._begins_of(rank))
        if problems and not os.path.exists(self.path):
            raise ExchangeError(f"{self.path}: removed while it was read, as retention does")
        if problems:
            raise DamagedError("\n".join(f"{self.manifest.tag}/{problem}" for problem in problems))

    def pieces(self, rank: int, indices: range) -> Iterator[Piece]:
        """Yield what the shard of `rank` has of the weights `indices`; of buffers, rank 0's."""
        for index in indices:
            weight, begin = self.weights[index], self._begins[rank][index]
            if weight.sliced:
                first, last = slice_of(weight.numel, self.manifest.world_size, rank)
            else:
                first, last = 0, weight.numel if rank == 0 else 0
            if first < last:
                size = (last - first) * ITEMSIZE[weight.stored]
                yield Piece(index, first, begin, begin + size)

    def open_shard(self, rank: int) -> int:
        """Open the shard of `rank`; the caller closes it. Raises ExchangeError if it has gone."""
        name = self.manifest.shards[rank].name
        try:
            return open_file(name, self._dir_fd)
        except OSError as error:
            raise ExchangeError(f"{os.path.join(self.path, name)}: {error.strerror}") from error

    def _begins_of(self, rank: int) -> "array[int]":
        descriptor = self.open_shard(rank)
        try:
            entries = read_header(descriptor, os.fstat(descriptor).st_size).entries
        finally:
            os.close(descriptor)
        return array("q", (entries[weight.entry].begin for weight in self.weights))


def read_at(descriptor: int, begin: int, end: int) -> memoryview:
    """Return the bytes [begin, end) of an open shard. Raises ExchangeError if it ends before."""
    window = memoryview(bytearray(end - begin))
    at = begin
    while at < end:
        count = os.preadv(descriptor, [window[at - begin :]], at)
        if count == 0:
            raise ExchangeError(f"a shard ends at byte {at}: it was changed while it was read")
        at += count
    return window


def _require_frozen(manifest: Manifest, path: str) -> None:
    if manifest.base is None:
        return
    missing = [parameter.name for parameter in manifest.parameters if not parameter.trainable]
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    raise ExchangeError(
        f"{path}: holds the trainable weights only: it was saved with exclude_frozen, on the base "
        f"{manifest.base.name or '(unnamed)'}\n  missing: {', '.join(missing[:_NAMED])}{more}\n"
        "Resume it with checkpoint.exclude_frozen=false, and export what is saved then"
    )


def _weights_of(manifest: Manifest) -> Iterator[Weight]:
    for parameter in manifest.parameters:
        if manifest.base is not None and not parameter.trainable:
            continue
        kind, stored = "frozen", parameter.dtype
        if parameter.master_dtype is not None:
            kind, stored = "master", parameter.master_dtype
        name = parameter.name
        yield Weight(name, f"{kind}/{name}", parameter.shape, stored, parameter.dtype, True)
    for entry in manifest.whole_entries:
        if entry.name.startswith(_BUFFER):
            name = entry.name.removeprefix(_BUFFER)
            yield Weight(name, entry.name, entry.shape, entry.dtype, entry.dtype, False)
