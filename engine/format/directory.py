"""Open and read the files of one checkpoint's directory.

Everything is read relative to one descriptor of the directory, so that a tag which is replaced
meanwhile is never read half and half. Links are not followed, and only regular files are opened.
"""

import os
import stat

from engine.format import names
from engine.format.errors import FormatError
from engine.format.manifest import Manifest

_MAX_DOCUMENT_BYTES = 1 << 30


def open_directory(path: str, dir_fd: int | None = None) -> int:
    """Open a directory for reading, not following a link in its last part. The caller closes it."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def open_file(name: str, dir_fd: int) -> int:
    """Open a regular file of a checkpoint's directory for reading. The caller closes it.

    Raises:
        OSError: it cannot be opened; ELOOP where it is a symbolic link.
        FormatError: it is a device, a pipe, or a directory.
    """
    # O_NONBLOCK: opening a pipe must not wait for a writer. It has no effect on regular files.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(f"{name}: not a regular file")
    return fd


def read_document(name: str, dir_fd: int) -> bytes:
    """Return the whole of a manifest or receipt.

    Raises:
        OSError: it cannot be read.
        FormatError: it is no regular file, or larger than 1 GiB.
    """
    fd = open_file(name, dir_fd)
    with open(fd, "rb") as file:
        data = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(data) > _MAX_DOCUMENT_BYTES:
        raise FormatError(f"{name}: larger than {_MAX_DOCUMENT_BYTES} bytes")
    return data


def read_manifest(dir_fd: int, where: str) -> Manifest:
    """Read and check the manifest of the checkpoint in an open directory.

    Args:
        where: the path of the directory, for messages; its last part must be the manifest's tag,
            or a name that begins with it (a stray).

    Raises:
        OSError: it cannot be read.
        FormatError: it is damaged, of an unknown version, or of another tag.
    """
    path = os.path.join(where, names.MANIFEST_NAME)
    manifest = Manifest.from_bytes(read_document(names.MANIFEST_NAME, dir_fd), path)
    directory = os.path.basename(where.rstrip("/"))
    if directory != manifest.tag and not directory.startswith(f"{manifest.tag}."):
        raise FormatError(
            f"{path}: belongs to another tag\n  in the manifest: {manifest.tag}\n"
            f"  directory:       {directory}\nrename the directory back"
        )
    return manifest
