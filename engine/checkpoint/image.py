"""The image: memory that is byte for byte the shard to be.

A memfd has no name to leak, is not bound by the size of /dev/shm, and its descriptor can be handed
to the writer, which then holds the bytes whatever becomes of the trainer.
"""

import mmap
import os

import torch

from engine.checkpoint.persist import ALIGNMENT_BYTES

# Linux constants that Python 3.10's mmap does not name (madvise(2); populate since Linux 5.14).
_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23


class Image:
    """One staging buffer of a rank, in shared memory; whole pages, prefaulted where Linux can."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.descriptor = os.memfd_create("everstep-image", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.size_bytes)
        self._mapping = mmap.mmap(self.descriptor, self.size_bytes)
        # A forked data worker must not keep hundreds of gigabytes of staging memory alive.
        self._mapping.madvise(_MADV_DONTFORK)
        try:
            # A first touch costs a page fault per 4 kB inside the pause of the first save.
            self._mapping.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            pass  # before Linux 5.14 the first save pays for the faults
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def write(self, offset: int, data: bytes) -> None:
        """Put `data` at byte `offset`."""
        self._mapping[offset : offset + len(data)] = data

    def region(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Return bytes [begin, end) as a 1-D CPU tensor of `dtype` that aliases the image."""
        return self.bytes[begin:end].view(dtype)

    def close(self) -> None:
        """Let go of the descriptor; the mapping goes with the last tensor that aliases it."""
        os.close(self.descriptor)
