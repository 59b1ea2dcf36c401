"""Whether a run is alive, and what it is saving, from its checkpoint directory. Reads only.

On the host that the run is on, its processes are looked up; from another host only the age of the
newest beat can be told, by this host's clock and the file server's.
"""

import os
import time
from dataclasses import dataclass

from engine import describe
from engine.format import names
from engine.format.errors import FormatError
from engine.protocol import commit
from engine.protocol.layout import OPEN, CheckpointDirectory
from engine.protocol.owner import Beat, Owner, Place, start_ticks
from launcher.seeing import lines

RUNNING = "running"
FINISHING = "finishing"
ENDED = "ended"
UNKNOWN = "unknown"

_SILENT_SECONDS = 45.0  # the default lease, after which another start may take over


@dataclass(frozen=True)
class InFlight:
    """A save that is not committed yet.

    receipts       of its `world_size` ranks' shards are durable
    written_bytes  of all shards, durable or not
    """

    tag: str
    receipts: int
    world_size: int
    written_bytes: int

    def words(self, expected_bytes: int | None) -> str:
        """Say how far it is, in comparison to what an earlier one had; None where none is known."""
        size = describe.size_text(self.written_bytes)
        if expected_bytes is not None:
            size += f" of about {describe.size_text(expected_bytes)}"
        return f"being saved: {self.receipts} of {self.world_size} shards, {size}"


@dataclass(frozen=True)
class Life:
    """What can be told of a run's newest attempt.

    state      running, finishing (the trainers have ended, the writers have not), ended, or unknown
    words      the same for people, with the host
    in_flight  its saves that are not committed yet
    """

    state: str
    words: str
    in_flight: tuple[InFlight, ...] = ()


def life_of(directory: CheckpointDirectory) -> Life:
    """Return what can be told of the run that keeps its checkpoints in `directory`."""
    try:
        return _life_of(directory)
    # The last three of an owner's record from another version, or of a name that nobody wrote.
    except (OSError, FormatError, TypeError, KeyError, ValueError) as error:
        return Life(UNKNOWN, f"cannot be told: {type(error).__name__}: {lines.text(error)}")


def _life_of(directory: CheckpointDirectory) -> Life:
    listed = _listing(directory.attempts)
    numbers = [int(name) for name in listed if name.isascii() and name.isdigit()]
    if not numbers:
        return Life(ENDED, "has never come as far as holding its checkpoint directory")
    attempt = directory.attempt(max(numbers))
    listed = _listing(attempt.path)
    if OPEN not in listed:
        return Life(ENDED, "has ended")
    with open(attempt.owner, "rb") as file:
        owner = Owner.from_bytes(file.read(), attempt.owner)
    in_flight = tuple(_in_flight(attempt.open, owner.world_size))
    beat = Beat.newest(listed)
    if owner.place == Place.here():
        if start_ticks(owner.pid) == owner.start_ticks:
            return Life(RUNNING, f"running on this host, process {owner.pid}", in_flight)
        if beat is not None and start_ticks(beat.pid) == beat.start_ticks:
            return Life(FINISHING, "has ended; its writers still write what was staged", in_flight)
        return Life(ENDED, "died without a word", in_flight)
    age = None if beat is None else _age_of(os.path.join(attempt.path, beat.name()))
    if age is None:
        return Life(UNKNOWN, f"cannot be told: {owner.place.host} has left no beat", in_flight)
    if age > _SILENT_SECONDS:
        return Life(ENDED, f"{owner.place.host} has been silent for {age:.0f} s", in_flight)
    return Life(RUNNING, f"running on {owner.place.host}, last beat {age:.0f} s ago", in_flight)


def _in_flight(path: str, world_size: int) -> list[InFlight]:
    saves = []
    for name in _listing(path):
        saved = names.save_of(name)
        if saved is not None:
            save = os.path.join(path, name)
            inside = _listing(save)
            there = world_size - len(commit.missing_receipts(inside, world_size))
            written = sum(
                _size_of(os.path.join(save, file)) for file in inside if names.is_shard(file)
            )
            saves.append(InFlight(saved[0], there, world_size, written))
    return saves


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # committed or abandoned meanwhile
        return 0


def _age_of(path: str) -> float | None:
    try:
        return max(0.0, time.time() - os.stat(path).st_ctime)  # a rename changes ctime, not mtime
    except OSError:
        return None


def _listing(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
