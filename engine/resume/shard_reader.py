"""Read a rank's part of a candidate's shards, and check those that are this rank's to check.

A shard that this rank checks is read whole, once, from its first byte to its last: each window is
digested and what is wanted of it copied out. Of other shards only the wanted bytes are read, and
their headers. A directory is opened once, and its files relative to that descriptor: what the name
comes to mean meanwhile does not matter.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import torch
import xxhash

from engine.format.directory import open_directory, open_file
from engine.format.errors import FormatError
from engine.format.manifest import Manifest
from engine.format.shard import ShardHeader
from engine.format.verify import check_header
from engine.protocol import files
from engine.resume.choose import Candidate
from engine.resume.errors import DamagedShardError
from engine.resume.reshard import Run, Take, runs_of
from engine.resume.windows import Windows

_RETRY_SECONDS = 60.0
_PAUSE_SECONDS = 0.5

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ShardReader:
    """Reads the shards of one candidate. A context manager; use it once.

    Args:
        windows: to read through; the caller closes them.
        full: whether the shards to check are digested; else their sizes and headers are checked.
        progress: called with the bytes that were read since its last call.
    """

    def __init__(
        self,
        candidate: Candidate,
        windows: Windows,
        *,
        full: bool,
        progress: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._candidate = candidate
        self._windows = windows
        self._full = full
        self._progress = progress
        self._directories: dict[str, int] = {}
        self._closing = ExitStack()
        self.bytes_read = 0

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._closing.close()

    def read(
        self, takes: Iterable[Take], tensors: Sequence[torch.Tensor], check: Collection[int]
    ) -> None:
        """Fill `tensors` with what `takes` say. Blocks; not collective.

        Every shard that is opened has its size and header checked; those in `check` are opened even
        where nothing is taken from them. A file that another client has just made is waited for up
        to a minute.

        Args:
            tensors: contiguous, on the CPU, of the dtypes of what they take.
            check: the shards that are this rank's to check.

        Raises:
            DamagedShardError: a shard is missing, short, damaged, or another save's; names the
                file. The tensors hold anything then.
        """
        by_shard: dict[int, list[Take]] = {shard: [] for shard in check}
        for take in takes:
            by_shard.setdefault(take.shard, []).append(take)
        targets = [_bytes_of(tensor) for tensor in tensors]
        for shard in sorted(by_shard):
            directory = self._candidate.directory_of(shard)
            path = os.path.join(directory, self._candidate.manifest.shards[shard].name)
            try:
                digested = self._full and shard in check
                self._read_shard(directory, shard, by_shard[shard], targets, digested)
            except OSError as error:
                raise DamagedShardError(f"{path}: {error.strerror}") from error
            except FormatError as error:
                raise DamagedShardError(f"{path}: {error}") from error

    def _read_shard(
        self,
        directory: str,
        shard: int,
        takes: Sequence[Take],
        targets: Sequence[_Bytes],
        digested: bool,
    ) -> None:
        manifest = self._candidate.manifest
        descriptor = self._open(directory, manifest.shards[shard].name)
        try:
            header = _checked_header(descriptor, manifest, shard)
            runs = runs_of(takes, header.entries)
            size = manifest.shards[shard].size_bytes
            spans = [(0, size)] if digested else [(run.begin, run.end) for run in runs]
            digest = xxhash.xxh3_128()
            scatter = _Scatter(runs, targets)
            with closing(self._windows.read(descriptor, spans, size)) as windows:
                for begin, window in windows:
                    if digested:
                        digest.update(window)
                    scatter.take_from(begin, window)
                    self.bytes_read += len(window)
                    self._progress(len(window))
            assert scatter.is_complete, "the windows cover all runs"
        finally:
            os.close(descriptor)
        wanted = manifest.shards[shard].digest
        if digested and digest.hexdigest() != wanted:
            raise FormatError(
                "its content has changed since it was written\n"
                f"  digest in the manifest: {wanted}\n  digest of the file:     "
                f"{digest.hexdigest()}"
            )

    def _open(self, directory: str, name: str) -> int:
        """Open a file of a committed tag; a tag that this client does not see yet is waited for.

        Raises OSError: ENOENT at once if a fresh listing shows the tag without the file.
        """
        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            listed: list[str] = []
            try:
                if directory not in self._directories:
                    listed = files.fresh_listing(directory)
                    self._directories[directory] = open_directory(directory)
                    self._closing.callback(os.close, self._directories[directory])
                return open_file(name, self._directories[directory])
            except OSError as error:
                if not files.is_gone(error):
                    raise
                self._directories.pop(directory, None)  # the next look is a fresh one
                listed = listed or files.fresh_listing(directory)
                if (listed and name not in listed) or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)


class _Scatter:
    """Copies runs out of windows, which come in the order of the file."""

    def __init__(self, runs: Sequence[Run], targets: Sequence[_Bytes]) -> None:
        self._runs = runs
        self._targets = targets
        self._next = 0

    @property
    def is_complete(self) -> bool:
        return self._next == len(self._runs)

    def take_from(self, begin: int, window: memoryview) -> None:
        """Copy what is wanted of the file's bytes from `begin` on."""
        end = begin + len(window)
        source = np.frombuffer(window, dtype=np.uint8)
        while self._next < len(self._runs):
            run = self._runs[self._next]
            first, last = max(run.begin, begin), min(run.end, end)
            if first < last:
                at = run.at + first - run.begin
                self._targets[run.target][at : at + last - first] = source[
                    first - begin : last - begin
                ]
            if run.end > end:
                return
            self._next += 1


def _checked_header(descriptor: int, manifest: Manifest, shard: int) -> ShardHeader:
    size, wanted = os.fstat(descriptor).st_size, manifest.shards[shard].size_bytes
    if size != wanted:
        raise FormatError(f"has {size} bytes, the manifest says {wanted}")
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no megabytes after the header
    return check_header(descriptor, size, manifest, shard)


def _bytes_of(tensor: torch.Tensor) -> _Bytes:
    array: _Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return array
