"""The image: memory that is byte for byte the shard to be.

A memfd has no name to leak, is not bound by the size of /dev/shm, and its descriptor can be handed
to the writer, which then holds the bytes whatever becomes of the trainer.

`Prefault` is a thread that does nothing but ask Linux for an image's pages, so that the first save
costs a warm copy and the start of training does not wait for it either.
"""

import ctypes
import logging
import mmap
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.checkpoint.persist import ALIGNMENT_BYTES

logger = logging.getLogger(__name__)

# Linux constants that Python 3.10's mmap does not name (madvise(2); populate since Linux 5.14).
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
# Of smaps (proc_pid_smaps(5)).
_FIELDS = ("Rss", "ShmemPmdMapped")
# While pages are made the trainer cannot map or unmap anything: so a little at a time.
_POPULATE_BYTES = 32 << 20

# Called this way, unlike mmap.madvise, it lets other threads run Python meanwhile.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Image:
    """One staging buffer of a rank, in shared memory; whole pages."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.descriptor = os.memfd_create("everstep-image", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self.size_bytes)
            self._mapping = mmap.mmap(self.descriptor, self.size_bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        # A forked data worker must not keep hundreds of gigabytes of staging memory alive.
        self._mapping.madvise(_MADV_DONTFORK)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._advise(0, self.size_bytes, _MADV_HUGEPAGE)  # refused by many kernels; see `residence`

    def write(self, offset: int, data: bytes) -> None:
        """Put `data` at byte `offset`."""
        self._mapping[offset : offset + len(data)] = data

    def populate(self, begin: int) -> int:
        """Take pages from byte `begin` on, a limited number; return where the next call begins.

        Returns the size of the image when it is done, or where Linux does not do it (before 5.14,
        out of memory): then the first copy takes the pages.
        """
        end = min(begin + _POPULATE_BYTES, self.size_bytes)
        populated = self._advise(begin, end - begin, _MADV_POPULATE_WRITE)
        return end if populated else self.size_bytes

    def residence(self) -> tuple[int, int]:
        """Return how many bytes of the mapping are in memory, and how many in huge pages."""
        smaps = Path("/proc/self/smaps").read_text()
        begin = smaps.index(f"{self.bytes.data_ptr():08x}-")
        found = [
            re.compile(rf"^{f}: +(\d+) kB", re.MULTILINE).search(smaps, begin) for f in _FIELDS
        ]
        resident, huge = (0 if match is None else 1024 * int(match[1]) for match in found)
        return resident, huge

    def close(self) -> None:
        """Let go of the descriptor; the mapping goes with the last tensor that aliases it."""
        os.close(self.descriptor)

    def _advise(self, begin: int, size: int, advice: int) -> bool:
        address = self.bytes.data_ptr() + begin
        return bool(_libc.madvise(address, size, advice) == 0)


class Prefault:
    """A thread that takes the pages of images, one image after the other, then calls `ready`."""

    def __init__(self, images: Sequence[Image], ready: Callable[[Image], None]) -> None:
        self._images = tuple(images)
        self._ready = ready
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-prefault", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all images are prefaulted."""
        self._thread.join()

    def stop(self) -> None:
        """End it, within a fraction of a second. Called before an image's memory may go."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for image in self._images:
            at = 0
            while at < image.size_bytes:
                if self._stop.is_set():
                    return
                at = image.populate(at)
            try:
                self._ready(image)
            except OSError:
                logger.exception("an image could not be pinned; copies to it will be slower")
        try:
            resident, huge = self._images[0].residence()
        except (OSError, ValueError) as error:
            logger.info("images of %d bytes; smaps: %r", self._images[0].size_bytes, error)
        else:
            logger.info(
                "%d images of %d bytes; of the first, %d bytes are in memory, %d in huge pages",
                len(self._images),
                self._images[0].size_bytes,
                resident,
                huge,
            )
