"""Read one rank's shard of a committed checkpoint, checked to the last bit.

The tag's directory is opened once, and everything is read relative to that descriptor: what the
name comes to mean meanwhile does not matter. Memory-mapped, so only what is copied out is kept.
"""

import errno
import math
import mmap
import os
import time
from typing import Any

import torch
import xxhash

from engine.format.dtypes import TORCH_NAME
from engine.format.errors import FormatError
from engine.format.layout import entries_of_manifest
from engine.format.manifest import Manifest
from engine.format.shard import Entry, check_metadata, read_header
from engine.protocol import files
from engine.resume.errors import DamagedShardError

_RETRY_SECONDS = 60.0
_PAUSE_SECONDS = 0.5


class ShardReader:
    """One rank's open shard. A context manager; tensors it returns are copies and outlive it."""

    def __init__(self, manifest: Manifest, directory: str, rank: int) -> None:
        """Open and check the shard of `rank`.

        Reads all of it: its digest is compared with the manifest's, so that what is copied out
        afterwards comes from the page cache. Blocks; a file that another client has just made is
        waited for up to a minute.

        Raises:
            DamagedShardError: missing, short, damaged, or another save's; names the file.
        """
        record = manifest.shards[rank]
        self._path = os.path.join(directory, record.name)
        try:
            descriptor = _open_listed(directory, record.name)
        except OSError as error:
            raise DamagedShardError(f"{self._path}: {error.strerror}") from error
        try:
            size = os.fstat(descriptor).st_size
            if size != record.size_bytes:
                raise DamagedShardError(
                    f"{self._path}: has {size} bytes, the manifest says {record.size_bytes}"
                )
            # Private and writable, because torch takes no read-only memory.
            self._mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        self._entries = self._check(manifest, rank, record.digest)

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the shard."""
        self._mapping.close()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a copy of entry `name`, on the CPU, in its stored shape and dtype."""
        entry = self._entries[name]
        dtype = getattr(torch, TORCH_NAME[entry.dtype])
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        mapped = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=entry.begin)
        return mapped.clone().reshape(entry.shape)

    def _check(self, manifest: Manifest, rank: int, digest: str) -> dict[str, Any]:
        with memoryview(self._mapping) as view:
            found = xxhash.xxh3_128(view).hexdigest()
            if found != digest:
                raise DamagedShardError(
                    f"{self._path}: its content has changed since it was written\n"
                    f"  digest in the manifest: {digest}\n  digest of the file:     {found}"
                )
            try:
                header = read_header(view, len(view))
                check_metadata(header, manifest.save_id, rank, manifest.world_size)
            except FormatError as error:
                raise DamagedShardError(f"{self._path}: {error}") from error
        wanted = entries_of_manifest(manifest, rank)
        stored = [Entry(name, e.dtype, e.shape) for name, e in header.entries.items()]
        if stored != wanted:
            raise DamagedShardError(
                f"{self._path}: its entries are not those that its manifest implies"
            )
        return header.entries


def _open_listed(directory: str, name: str) -> int:
    """Open a file of a committed tag; a tag that this client does not see yet is waited for.

    Raises OSError: ENOENT at once if a fresh listing shows the tag without the file.
    """
    deadline = time.monotonic() + _RETRY_SECONDS
    listed: list[str] = []
    while True:
        try:
            listed = files.fresh_listing(directory)
            if listed:
                parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=parent)
                finally:
                    os.close(parent)
        except OSError as error:
            if not files.is_gone(error) or name not in listed or time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
        time.sleep(_PAUSE_SECONDS)
