"""What the command line tools do: find checkpoints, list them, describe one, verify them.

Reads only. Needs no run, no GPU, no torch and no DeepSpeed, and may look on while a run saves and
prunes: a tag's directory is opened once, and everything is read relative to it. Nothing is printed
here; `engine.__main__` does that.
"""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.format import names
from engine.format.directory import open_directory, read_manifest
from engine.format.errors import FormatError
from engine.format.manifest import Manifest
from engine.format.verify import Problem, verify_tag
from engine.protocol.layout import CheckpointDirectory


class InspectError(Exception):
    """What was asked for is not there: not a damaged checkpoint, but none."""


class GoneError(InspectError):
    """A checkpoint was removed or replaced while it was read, as retention does."""


@dataclass(frozen=True)
class Place:
    """Where to look.

    directory  the checkpoints directory
    tag        the one tag that the user named by its own directory, or None
    """

    directory: CheckpointDirectory
    tag: str | None = None


@dataclass(frozen=True)
class Listed:
    """One checkpoint that a listing found.

    name      of its directory
    path      of its directory
    manifest  None where it is not readable
    state     for people: ``committed``, ``committed, latest``, ``on the nodes' disks``, ``stray``,
              ``damaged``
    error     why the manifest is not readable, or None
    """

    name: str
    path: str
    manifest: Manifest | None
    state: str
    error: str | None


def locate(path: str) -> Place:
    """Return where to look, given a run directory, a checkpoints directory or a tag's directory.

    Raises:
        InspectError: `path` is none of these.
    """
    real = os.path.realpath(path)
    try:
        inside = os.listdir(real)
    except OSError as error:
        raise InspectError(f"{path}: cannot be listed: {error.strerror}") from error
    if names.MANIFEST_NAME in inside or names.step_of(os.path.basename(real)) is not None:
        return Place(CheckpointDirectory(os.path.dirname(real)), os.path.basename(real))
    for candidate in (os.path.join(real, "checkpoints"), real):
        directory = CheckpointDirectory(candidate)
        if _tags(directory) or os.path.isdir(directory.attempts):
            return Place(directory)
    raise InspectError(
        f"{path}: no checkpoints here. Wanted a run directory (with checkpoints/ in it), a "
        "checkpoints directory (with global_step<number>/ or .attempts/ in it), or one "
        "checkpoint's directory (with manifest.json in it)"
    )


def listing(place: Place, *, strays: bool) -> list[Listed]:
    """Return the committed checkpoints by step, the oldest first; or the strays instead."""
    directory = place.directory
    if strays:
        found = [(n, os.path.join(directory.strays, n)) for n in _names_in(directory.strays)]
    else:
        tags = [place.tag] if place.tag else _tags(directory)
        found = [(tag, directory.tag(tag)) for tag in tags]
    latest = read_latest(directory)
    listed = []
    for name, path in found:
        state = "stray" if strays else "committed, latest" if name == latest else "committed"
        with contextlib.suppress(GoneError):
            listed.append(_listed(name, path, state))
    return listed


def only_local(place: Place) -> list[Listed]:
    """Return what is committed in the local tier, and not in the shared directory yet."""
    directory, listed = place.directory, []
    if place.tag is None:
        tags = _tags(directory)
        for name in _names_in(directory.local_saves):
            if name.partition(".")[0] not in tags:
                path = os.path.join(directory.local_saves, name)
                with contextlib.suppress(GoneError):
                    listed.append(_listed(name, path, "on the nodes' disks"))
    return listed


def read_latest(directory: CheckpointDirectory) -> str | None:
    """Return what the file ``latest`` names, whether or not it is there."""
    try:
        with open(directory.latest, encoding="ascii", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return None


def choose(place: Place, tag: str | None) -> str:
    """Return the path of the checkpoint to look at: `tag`, else the newest committed one.

    Args:
        tag: a committed tag, or the name of a stray.

    Raises:
        InspectError: it is not there.
    """
    if place.tag is not None:
        if tag not in (None, place.tag):
            raise InspectError(f"--tag {tag}: the directory given is that of {place.tag}")
        return place.directory.tag(place.tag)
    tags = _tags(place.directory)
    if tag is None:
        if not tags:
            raise InspectError(f"{place.directory.root}: nothing has been committed yet")
        return place.directory.tag(tags[-1])
    if tag in tags:
        return place.directory.tag(tag)
    if tag in _names_in(place.directory.strays):
        return os.path.join(place.directory.strays, tag)
    there = ", ".join(tags) or "none"
    raise InspectError(f"--tag {tag}: not in {place.directory.root}; there are: {there}")


def choose_all(place: Place) -> list[str]:
    """Return the paths of all committed checkpoints, the oldest first.

    Raises:
        InspectError: there is none.
    """
    if place.tag is not None:
        return [place.directory.tag(place.tag)]
    return [place.directory.tag(tag) for tag in _tags(place.directory)] or [choose(place, None)]


def choose_strays(place: Place) -> list[str]:
    """Return the paths of the checkpoints off the line of history."""
    return [
        os.path.join(place.directory.strays, name) for name in _names_in(place.directory.strays)
    ]


def load(path: str) -> Manifest:
    """Return the manifest of the checkpoint at `path`.

    Raises:
        FormatError: it is damaged, or of an unknown version.
        GoneError: the directory was removed or replaced meanwhile.
        InspectError: the directory or the manifest cannot be opened.
    """
    with _opened(path) as dir_fd:
        try:
            return read_manifest(dir_fd, path)
        except OSError as error:
            _require_still_there(path, dir_fd)
            where = os.path.join(path, names.MANIFEST_NAME)
            raise InspectError(f"{where}: cannot be read: {error.strerror}") from error


def verify(path: str, progress: Callable[[int], None] | None = None) -> list[Problem]:
    """Read every byte of the checkpoint at `path` and return all that is wrong with it.

    Raises:
        GoneError: the directory was removed or replaced meanwhile.
        InspectError: it cannot be opened.
    """
    with _opened(path) as dir_fd:
        problems = verify_tag(dir_fd, path, progress=progress)
        if problems:
            _require_still_there(path, dir_fd)
    return problems


def shard_sizes(path: str) -> list[int]:
    """Return the bytes of each shard that is there, of the checkpoint at `path`; unread.

    Raises:
        GoneError, InspectError: as `verify`.
    """
    with _opened(path) as dir_fd, os.scandir(dir_fd) as entries:
        return [
            entry.stat(follow_symlinks=False).st_size
            for entry in entries
            if names.is_shard(entry.name) and entry.is_file(follow_symlinks=False)
        ]


def age_of(manifest: Manifest, now: datetime.datetime) -> datetime.timedelta:
    """Return how long before `now` the checkpoint was staged."""
    return now - datetime.datetime.fromisoformat(manifest.staged_at)


def _listed(name: str, path: str, state: str) -> Listed:
    try:
        return Listed(name, path, load(path), state, None)
    except GoneError:
        raise
    except (FormatError, InspectError) as error:
        return Listed(name, path, None, "damaged", str(error))


def _tags(directory: CheckpointDirectory) -> list[str]:
    steps = {names.step_of(name): name for name in _names_in(directory.root)}
    return [steps[step] for step in sorted(step for step in steps if step is not None)]


def _names_in(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        dir_fd = open_directory(path)
    except FileNotFoundError as error:
        raise GoneError(f"{path}: is no longer there") from error
    except OSError as error:
        raise InspectError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        yield dir_fd
    finally:
        os.close(dir_fd)


def _require_still_there(path: str, dir_fd: int) -> None:
    """Raise GoneError unless `path` is the directory that `dir_fd` is open on."""
    try:
        same = os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(dir_fd))
    except OSError:
        same = False
    if not same:
        raise GoneError(f"{path}: removed or replaced while it was read; look again")
