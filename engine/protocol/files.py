"""The few file system operations that the protocol is made of.

Blocking, no retries, no state. Paths are strings; directories are renamed, never copied.
"""

import enum
import errno
import os
import secrets

_GONE = (errno.ENOENT, errno.ESTALE)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
# File systems without fsync on directories (FUSE, object-store mounts) answer with these.
_POKE = ".poke."
_PART = ".part."
_TRANSIENT = (_POKE, _PART)
_NO_DIRECTORY_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EBADF, errno.ENOTSUP)


class Renamed(enum.Enum):
    """What a decisive rename found."""

    DONE = "done"
    TAKEN = "taken"
    GONE = "gone"


def is_gone(error: OSError) -> bool:
    """Tell whether `error` means that the name no longer leads anywhere."""
    return error.errno in _GONE


def rename_new(source: str, target: str) -> Renamed:
    """Rename the non-empty directory `source` to `target`, which must not hold a non-empty one.

    Raises OSError for anything but a missing source and a taken target.
    """
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in _TAKEN:
            return Renamed.TAKEN
        if error.errno in _GONE:
            return Renamed.GONE
        raise
    return Renamed.DONE


def fresh_listing(directory: str) -> list[str]:
    """List `directory` as it is now, whatever a network client has cached; [] if it is gone.

    Creating and unlinking a name changes the directory, which makes a caching client ask anew.
    Names that start with a dot are left out: they are pokes and parts, never a fact.
    """
    poke = os.path.join(directory, f"{_POKE}{os.getpid()}.{secrets.token_hex(4)}")
    try:
        os.close(os.open(poke, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        os.unlink(poke)
    except OSError as error:
        if not is_gone(error):
            raise
    return listing(directory)


def listing(directory: str) -> list[str]:
    """List `directory`, sorted, without dot names; [] if it is gone. May be a cached answer."""
    try:
        return sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except OSError as error:
        if is_gone(error):
            return []
        raise


def fsync_directory(directory: str) -> None:
    """Make the names in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(descriptor)


def write_durably(path: str, data: bytes, mode: int = 0o644) -> None:
    """Put `data` at `path`, durably, so that a reader sees all of it or nothing.

    `mode` is the file's, less the umask.
    """
    directory = os.path.dirname(path)
    part = os.path.join(directory, f"{_PART}{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(part, path)
    except OSError:
        _unlink_quietly(part)
        raise
    fsync_directory(directory)


def touch(path: str) -> None:
    """Create the empty file `path`; the fact is in its name."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def read_listed(path: str) -> bytes | None:
    """Read a file that a listing has shown; None if it has gone since."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        if is_gone(error):
            return None
        raise


def remove_transient(directory: str) -> None:
    """Delete the pokes and parts that killed processes have left in `directory`.

    Safe beside living ones: who misses a poke goes on, and a part is missed only where its writer
    has no business any more (in the directory of a whole save, or of an attempt that is over).
    """
    try:
        names = os.listdir(directory)
    except OSError as error:
        if is_gone(error):
            return
        raise
    for name in names:
        if name.startswith(_TRANSIENT):
            _unlink_quietly(os.path.join(directory, name))


def remove_tree(directory: str, first: str) -> None:
    """Delete a two-level `directory`, its entry `first` before all others; pass over what is gone.

    By path, not by descriptor: once a newer attempt has renamed a parent, every further unlink
    misses, so a process that was stopped in here and woken late deletes nothing of its successor's.
    """
    try:
        names = os.listdir(directory)
    except NotADirectoryError:
        _unlink_quietly(directory)
        return
    except OSError as error:
        if is_gone(error):
            return
        raise
    for name in sorted(names, key=lambda name: name != first):
        _unlink_quietly(os.path.join(directory, name))
    try:
        os.rmdir(directory)
    except OSError as error:
        # A writer that does not know yet may still add to the directory: the next sweep takes it.
        if not is_gone(error) and error.errno not in _TAKEN:
            raise


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        if not is_gone(error):
            raise
