"""The settings of saving and resuming, checked when they are made."""

import os
from dataclasses import dataclass, field

from engine.protocol.acquire import Lease
from engine.protocol.retention import KeepBest, Retention


@dataclass(frozen=True)
class CheckpointOptions:
    """Settings of a `Checkpointer`.

    local_dir                absolute path on each node's own fast disk, where a save is written and
                             committed first; None goes straight to the shared directory
    keep_last                committed tags of the run's own history that are kept, at least 1
    keep_every_steps         tags whose step is a multiple of it are kept for ever
    keep_best                the best tags of a metric that `save` is given are kept, too
    commit_deadline_seconds  from rank 0's receipt to the last one; later the save is abandoned
    max_failures             saves that fail in a row before the run stops with the error
    when_busy                both images still being written when a save is due: "wait" or "skip"
    verify_on_resume         "full" digests every shard of what is resumed from; "size" checks sizes
                             and headers, and takes a flipped bit in the data for training state
    exclude_frozen           frozen parameters are not stored, only what identifies them: for
                             adapters on a large base, which each start must load by itself
    base_name                what the user calls that base, for messages
    paranoid                 read each commit back and compare it with the state that was live
    writer_silence_seconds   a writer that says nothing for so long is killed and replaced
    bytes_per_second         cap of each writer's writes to the shared disk; None leaves them free
    lease                    when an attempt on another host is taken for dead
    log_directory            for the writers' logs; None puts them into the attempt's directory
    """

    local_dir: str | None = None
    keep_last: int = 2
    keep_every_steps: int | None = None
    keep_best: KeepBest | None = None
    commit_deadline_seconds: float = 600.0
    max_failures: int = 3
    when_busy: str = "wait"
    verify_on_resume: str = "full"
    exclude_frozen: bool = False
    base_name: str | None = None
    paranoid: bool = False
    writer_silence_seconds: float = 60.0
    bytes_per_second: float | None = None
    lease: Lease = field(default_factory=Lease)
    log_directory: str | None = None

    def __post_init__(self) -> None:
        Retention(self.keep_last, self.keep_every_steps, self.keep_best)  # it checks them
        if self.local_dir is not None and not os.path.isabs(self.local_dir):
            raise ValueError(f"local_dir is {self.local_dir!r}, wanted an absolute path")
        if self.max_failures < 1:
            raise ValueError(f"max_failures is {self.max_failures}, wanted 1 or more")
        if self.when_busy not in ("wait", "skip"):
            raise ValueError(f"when_busy is {self.when_busy!r}, wanted wait or skip")
        if self.verify_on_resume not in ("full", "size"):
            raise ValueError(f"verify_on_resume is {self.verify_on_resume!r}, wanted full or size")
        for name in ("commit_deadline_seconds", "writer_silence_seconds", "bytes_per_second"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}, wanted more than 0")
