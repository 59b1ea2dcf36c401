"""Names and paths of a checkpoint directory: the one place that knows where things lie.

checkpoints/
  global_step400/                 committed: it arrived here by one rename
  latest                          the newest committed tag, for people; resume does not read it
  .stray/global_step400.<save id> whole tags off the run's line of history
  .local/global_step400.<save id> a save whose shards are on the nodes' own disks: its manifest
  .attempts/0007/                 never removed: the directory is the attempt number
    owner.json  start.json        who runs it; what it descends from
    beat.00000123.running.PID.TICKS.HOST
    open/  ->  closed/            renamed once, by anyone: the attempt is over
      global_step400.s0012/       one save under way
      global_step400.s0012.local/ receipts for its shards on the nodes' own disks
      gone.00003                  that rank's writer has left
      trash/                      on its way out

<local_dir>/<run>/<save id>/      on each node, in the local tier; run is attempt 0's nonce
  rank_00003_of_00008.safetensors
"""

import os
from dataclasses import dataclass

from engine.format import names

OWNER = "owner.json"
START = "start.json"
MANIFEST = "manifest.json"
LATEST = "latest"
OPEN = "open"
CLOSED = "closed"
TRASH = "trash"
_ATTEMPTS = ".attempts"
_STRAY = ".stray"
_LOCAL = ".local"


@dataclass(frozen=True)
class CheckpointDirectory:
    """Paths under one checkpoint directory. Pure: touches nothing."""

    root: str

    @property
    def attempts(self) -> str:
        """Path of the directory with one directory for each attempt."""
        return os.path.join(self.root, _ATTEMPTS)

    @property
    def strays(self) -> str:
        """Path of the directory with committed tags off the line of history."""
        return os.path.join(self.root, _STRAY)

    @property
    def latest(self) -> str:
        """Path of the file with the newest committed tag, for people."""
        return os.path.join(self.root, LATEST)

    def tag(self, tag: str) -> str:
        """Path of a committed tag."""
        return os.path.join(self.root, tag)

    def stray(self, tag: str, save_id: str) -> str:
        """Path of a committed tag that is off the line of history."""
        return os.path.join(self.strays, f"{tag}.{save_id}")

    @property
    def local_saves(self) -> str:
        """Path of the directory with the saves that are committed in the local tier."""
        return os.path.join(self.root, _LOCAL)

    def local_save(self, tag: str, save_id: str) -> str:
        """Path of the manifest and the receipts of a save that is committed in the local tier."""
        return os.path.join(self.local_saves, f"{tag}.{save_id}")

    def attempt(self, number: int) -> "AttemptDirectory":
        """Paths of one attempt."""
        return AttemptDirectory(os.path.join(self.attempts, names.attempt_name(number)), number)


@dataclass(frozen=True)
class AttemptDirectory:
    """Paths under one attempt. Pure: touches nothing."""

    path: str
    number: int

    @property
    def owner(self) -> str:
        """Path of the file that says who runs the attempt."""
        return os.path.join(self.path, OWNER)

    @property
    def start(self) -> str:
        """Path of the file that says which checkpoint the attempt descends from."""
        return os.path.join(self.path, START)

    @property
    def open(self) -> str:
        """Path of the directory with the saves under way; it is there while the attempt lasts."""
        return os.path.join(self.path, OPEN)

    @property
    def closed(self) -> str:
        """Path of that directory once the attempt is over."""
        return os.path.join(self.path, CLOSED)

    @property
    def trash(self) -> str:
        """Path of the directory for what is about to be removed, while the attempt is open."""
        return os.path.join(self.path, OPEN, TRASH)

    def save(self, save_directory: str) -> str:
        """Path of one save while the attempt is open."""
        return os.path.join(self.open, save_directory)

    def local_receipts(self, save_directory: str) -> str:
        """Path of the receipts for one save's shards on the nodes' own disks."""
        return os.path.join(self.open, names.local_receipts_directory(save_directory))

    def gone(self, rank: int) -> str:
        """Path of the sign that the writer of `rank` has left."""
        return os.path.join(self.open, names.gone_name(rank))
