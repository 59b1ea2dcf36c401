"""Look at a checkpoint directory from outside: whole tags, and what should not be there."""

import os
from collections.abc import Callable

from engine.format import names
from engine.format.manifest import Manifest
from engine.protocol.layout import (
    CLOSED,
    LATEST,
    MANIFEST,
    OPEN,
    TRASH,
    AttemptDirectory,
    CheckpointDirectory,
)
from tests.protocol.driver.content import read_whole

_ATTEMPT_FILES = ("owner.json", "start.json")


class LeftError(AssertionError):
    """Something is there that should have been swept."""


class Reader:
    """Reads every byte of every tag, once for each directory that arrived."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self._directory = directory
        self._read: dict[tuple[str, int, bytes], Manifest] = {}
        self.verified = 0

    def in_place(self) -> list[Manifest]:
        """Read all tags in their places. Raises MixedError, or FormatError for a damaged one."""
        found = [self._tag(self._directory.tag(name)) for name in _tags(self._directory.root)]
        return [manifest for manifest in found if manifest is not None]

    def strays(self) -> list[Manifest]:
        """Read all tags off the line."""
        parent = self._directory.strays
        found = [self._tag(os.path.join(parent, name)) for name in _names(parent)]
        return [manifest for manifest in found if manifest is not None]

    def _tag(self, path: str) -> Manifest | None:
        """Read one tag; None if retention takes it away at the same time."""
        try:
            arrived = _identity(path)
            known = self._read.get(arrived)
            manifest = known or read_whole(path)
            if _identity(path) != arrived:
                return self._tag(path)
            self._read[arrived] = manifest
        except FileNotFoundError:
            if os.path.exists(os.path.join(path, MANIFEST)):
                return self._tag(path)  # another save has come to its place
            if os.path.exists(path):
                raise  # visible, and without a manifest
            return None
        if known is None:
            self.verified += 1
        return manifest


def _identity(path: str) -> tuple[str, int, bytes]:
    """Return what tells one arrival at a path from another.

    Its inode alone does not: a file system gives that of a removed directory to the next one.
    """
    with open(os.path.join(path, MANIFEST), "rb") as file:
        return path, os.stat(path).st_ino, file.read()


def check_latest(directory: CheckpointDirectory, in_place: list[Manifest]) -> None:
    """Raise LeftError unless the pointer for people names the newest tag."""
    newest = max(in_place, key=lambda manifest: manifest.step)
    with open(directory.latest, encoding="ascii") as file:
        found = file.read()
    if found != f"{newest.tag}\n":
        raise LeftError(f"latest holds {found!r}; the newest tag is {newest.tag}")


def check_leftovers(
    directory: CheckpointDirectory, current: int | None, *, transient: bool
) -> None:
    """Raise LeftError for what attempt `current` should have swept when it began.

    None means that all attempts are over. `transient` is whether older writers still run: their
    pokes and parts come and go.
    """
    root = directory.root
    own = (LATEST, ".attempts", ".stray", ".local")
    found = _foreign(root, lambda name: name in own or _is_tag(name))
    for tag in _tags(root):
        found += _foreign_in_tag(directory.tag(tag))
    found += _foreign(directory.attempts, str.isdigit)
    for name in filter(str.isdigit, _names(directory.attempts)):
        found += _foreign_in_attempt(directory.attempt(int(name)), current)
    if transient:
        found = [path for path in found if not os.path.basename(path).startswith(".")]
    if found:
        raise LeftError(f"attempt {current} should have swept {found}")


def check_local(directory: CheckpointDirectory, parent: str | None, *, transient: bool) -> None:
    """Raise LeftError unless `parent`, a save id, is the only one that may be in the local tier."""
    found = _foreign(
        directory.local_saves,
        lambda name: name.partition(".")[2] == parent or (transient and name.startswith(".")),
    )
    if found:
        raise LeftError(f"only {parent} may be in the local tier; there are {found}")


def _foreign_in_attempt(attempt: AttemptDirectory, current: int | None) -> list[str]:
    over = OPEN if attempt.number == current else CLOSED
    wanted = (*_ATTEMPT_FILES, over)
    found = _foreign(attempt.path, lambda name: name in wanted or name.startswith("beat."))
    found += _foreign(attempt.closed, lambda name: name == TRASH or name.startswith("gone."))
    return found + _foreign(os.path.join(attempt.closed, TRASH), lambda name: False)


def _foreign_in_tag(path: str) -> list[str]:
    ranks = [name for name in _names(path) if name.endswith(".safetensors")]
    world_size = len(ranks)
    wanted = {MANIFEST}
    for rank in range(world_size):
        wanted |= {names.shard_name(rank, world_size), names.receipt_name(rank, world_size)}
    return _foreign(path, lambda name: name in wanted)


def _foreign(directory: str, belongs: Callable[[str], bool]) -> list[str]:
    paths = [os.path.join(directory, name) for name in _names(directory) if not belongs(name)]
    return [path for path in paths if os.path.lexists(path)]


def _is_tag(name: str) -> bool:
    return names.step_of(name) is not None


def _tags(root: str) -> list[str]:
    return [name for name in _names(root) if _is_tag(name)]


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
