"""Take the next attempt number of a checkpoint directory; refuse while another run lives in it.

The number is taken by renaming a prepared directory onto it. There is no other lock and no wall
clock: a lock file would outlive a SIGKILL, and clocks differ between hosts. Called by rank 0 only;
blocks while an older attempt's writer finishes what was staged.
"""

import errno
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.protocol import files
from engine.protocol.files import Renamed
from engine.protocol.layout import OPEN, OWNER, TRASH, CheckpointDirectory
from engine.protocol.owner import DRAINING, Beat, Owner, Place, start_ticks

logger = logging.getLogger(__name__)

_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_PREPARED = ".new."
_MINIMUM_LISTINGS = 9
_WAIT_SECONDS = 0.05
_WAIT_MAXIMUM_SECONDS = 1.0
_SAY_AFTER_SECONDS = 2.0


class RunHeldError(Exception):
    """Another live run holds the checkpoint directory."""


class UnsuitableDirectoryError(Exception):
    """The file system does not do what the protocol stands on."""


@dataclass(frozen=True)
class Lease:
    """How long an attempt on another host may be silent before it is taken for dead.

    `beat_seconds` is how often a writer beats; `seconds` how long no change must be seen.
    """

    seconds: float = 45.0
    beat_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.beat_seconds <= self.seconds / _MINIMUM_LISTINGS:
            raise ValueError(
                f"a lease of {self.seconds:g} s with a beat every {self.beat_seconds:g} s: wanted "
                f"{_MINIMUM_LISTINGS} beats or more in a lease"
            )


def acquire(
    directory: CheckpointDirectory,
    owner: Owner,
    lease: Lease,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Owner:
    """Take the next attempt number for `owner`, ending the attempt before if it is dead.

    Returns `owner` with its attempt number. Blocks while the previous attempt's writer drains, or
    until an attempt on another host has been silent for the lease.

    Raises:
        RunHeldError: the previous attempt is alive.
        UnsuitableDirectoryError: it is no directory, renaming overwrites, or fsync does not work.
        OSError: the disk fails.
    """
    try:
        os.makedirs(directory.attempts, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        in_the_way = _first_non_directory(directory.attempts)
        if in_the_way is None:
            raise
        raise UnsuitableDirectoryError(
            f"{directory.root}: {in_the_way} is a file, or a link to nowhere, where a directory is "
            "wanted. Move it away, or set checkpoint.dir to another path"
        ) from error
    while True:
        newest = max(attempt_numbers(directory), default=-1)
        if newest >= 0:
            _end(directory, newest, owner, lease, clock, sleep)
        taken = replace(owner, attempt=newest + 1)
        if _take(directory, taken):
            return taken


def _first_non_directory(path: str) -> str | None:
    """Return which part of `path` is in the way of a directory; None if there is none.

    Raises OSError where a part cannot be looked at: to `makedirs`, what a failing disk does not
    show as a directory is none.
    """
    for part in (*reversed(Path(path).parents), Path(path)):
        try:
            mode = os.stat(part).st_mode
        except FileNotFoundError:
            return str(part)
        if not stat.S_ISDIR(mode):
            return str(part)
    return None


def refuse_if_held(directory: CheckpointDirectory) -> None:
    """Raise RunHeldError if a process of this very host visibly holds the directory.

    Looks only, and promises nothing: `acquire` decides. It spares a second start the minutes that
    building a model can take.
    """
    if not os.path.isdir(directory.attempts):
        return
    numbers = [int(name) for name in files.listing(directory.attempts) if name.isdigit()]
    attempt = directory.attempt(max(numbers, default=0))
    listed = files.listing(attempt.path)
    data = files.read_listed(attempt.owner) if {OPEN, OWNER} <= set(listed) else None
    if data is not None:
        _refuse_live_trainer(Owner.from_bytes(data, attempt.owner), Place.here())


def attempt_numbers(directory: CheckpointDirectory) -> list[int]:
    """List the attempts of a directory, oldest first."""
    return [int(name) for name in files.fresh_listing(directory.attempts) if name.isdigit()]


def remove_prepared(directory: CheckpointDirectory, up_to: int) -> None:
    """Delete what killed starts had prepared for attempt numbers that are taken by now."""
    for name in os.listdir(directory.attempts):
        number = name.removeprefix(_PREPARED).partition(".")[0]
        if name.startswith(_PREPARED) and number.isdigit() and int(number) <= up_to:
            shutil.rmtree(os.path.join(directory.attempts, name), ignore_errors=True)


def _take(directory: CheckpointDirectory, owner: Owner) -> bool:
    path = directory.attempt(owner.attempt).path
    name = f"{_PREPARED}{os.path.basename(path)}.{owner.nonce}.{secrets.token_hex(4)}"
    prepared = os.path.join(directory.attempts, name)
    try:
        os.makedirs(os.path.join(prepared, OPEN, TRASH))
        _check_rename(prepared)
        _check_fsync(prepared)
        files.write_durably(os.path.join(prepared, OWNER), owner.to_bytes())
        outcome = files.rename_new(prepared, path)
    except OSError as error:
        if not files.is_gone(error):
            raise
        outcome = Renamed.GONE  # whoever has taken the number has tidied up
    if outcome is Renamed.DONE:
        files.fsync_directory(directory.attempts)
        return True
    logger.info("attempt %d was taken by another start; trying the next", owner.attempt)
    shutil.rmtree(prepared, ignore_errors=True)
    return False


def _end(
    directory: CheckpointDirectory,
    number: int,
    me: Owner,
    lease: Lease,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Return once attempt `number` is closed, by itself or by this process."""
    attempt = directory.attempt(number)
    watch = _Watch(lease, clock)
    started, said = clock(), False
    pause = _WAIT_SECONDS
    while True:
        listed = files.fresh_listing(attempt.path)
        if OPEN not in listed:
            return
        data = files.read_listed(attempt.owner) if OWNER in listed else None
        owner = Owner.from_bytes(data, attempt.owner) if data is not None else None
        if owner is not None and _is_over(owner, me, Beat.newest(listed), listed, watch):
            logger.info("closing attempt %d: its processes are gone", number)
            if files.rename_new(attempt.open, attempt.closed) is not Renamed.GONE:
                return
        if not said and clock() - started > _SAY_AFTER_SECONDS:
            where = "an unknown host" if owner is None else owner.place.host
            logger.warning("waiting for attempt %d on %s to end", number, where)
            said = True
        sleep(pause)
        pause = min(pause * 1.5, _WAIT_MAXIMUM_SECONDS, lease.seconds / _MINIMUM_LISTINGS)


@dataclass
class _Watch:
    """Watches one attempt's names for change, by this process's own monotonic clock."""

    lease: Lease
    clock: Callable[[], float]
    names: list[str] | None = None
    since: float = 0.0
    listings: int = 0
    changes: int = 0

    def is_silent(self, names: list[str]) -> bool:
        """Take in a fresh listing; tell whether nothing has changed for the lease."""
        now = self.clock()
        if names != self.names:
            self.changes += self.names is not None
            self.names, self.since, self.listings = names, now, 0
        self.listings += 1
        return now - self.since >= self.lease.seconds and self.listings >= _MINIMUM_LISTINGS


def _is_over(owner: Owner, me: Owner, beat: Beat | None, listed: list[str], watch: _Watch) -> bool:
    """Judge an open attempt: True if it is dead, False to go on waiting; raises if it lives."""
    if owner.is_requeued_as(me):
        return True
    if owner.place == me.place:
        _refuse_live_trainer(owner, me.place)
        writer_is_alive = beat is not None and start_ticks(beat.pid) == beat.start_ticks
        # A writer that is there but silent for a lease is stopped or stuck: fence it.
        return not writer_is_alive or watch.is_silent(listed)
    silent = watch.is_silent(listed)
    if watch.changes and beat is not None and beat.state != DRAINING:
        raise RunHeldError(_held(owner, f"its writer (process {beat.pid}) goes on beating"))
    return silent


def _refuse_live_trainer(owner: Owner, here: Place) -> None:
    if owner.place == here and start_ticks(owner.pid) == owner.start_ticks:
        raise RunHeldError(_held(owner, f"process {owner.pid} is running"))


def _held(owner: Owner, sign: str) -> str:
    job = f", Slurm job {owner.slurm_job}" if owner.slurm_job else ""
    return (
        f"the checkpoint directory is held by attempt {owner.attempt} on host "
        f"{owner.place.host}{job}: {sign}. Stop that run, or give this one another run.name"
    )


def _check_rename(parent: str) -> None:
    """Refuse a file system (some object-store mounts) whose rename overwrites a directory."""
    probe = os.path.join(parent, "probe")
    try:
        for name in ("a", "b"):
            os.makedirs(os.path.join(probe, name))
            files.touch(os.path.join(probe, name, "full"))
        outcome = files.rename_new(os.path.join(probe, "a"), os.path.join(probe, "b"))
        if outcome is Renamed.DONE:
            raise UnsuitableDirectoryError(
                f"{parent}: renaming a directory onto a non-empty one overwrote it. Checkpoints "
                "commit by a rename that must not do that: set checkpoint.dir to a directory of a "
                "POSIX file system"
            )
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _check_fsync(parent: str) -> None:
    """Refuse a file system where nothing can be made durable."""
    probe = os.path.join(parent, "probe")
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise
        raise UnsuitableDirectoryError(
            f"{parent}: fsync does not work here ({error.strerror}), so that what was committed "
            "could be lost all the same: set checkpoint.dir to a directory of a file system that "
            "has it"
        ) from error
    finally:
        os.close(descriptor)
        os.unlink(probe)
