"""The settings of saving: when, where to, what is kept, and what is done when it fails."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.schema import at_least, require

_LEAST_LEASE_SECONDS = 45


@dataclass(frozen=True)
class KeepBestSettings:
    """Which checkpoints are the best ones."""

    metric: Literal["loss"]
    """The mean over the global batch of the step that the save follows."""
    mode: Literal["min", "max"]
    """`min` keeps the smallest, `max` the largest."""
    count: int
    """How many are kept."""

    def __post_init__(self) -> None:
        at_least("checkpoint.keep_best.count", self.count, 1)


@dataclass(frozen=True)
class AutoSettings:
    """What the plan of `checkpoint=auto` is told; the rest it measures."""

    mtbf_hours: float | None
    """Mean time between failures of the whole run; null estimates it from the run's attempts."""

    def __post_init__(self) -> None:
        require(
            self.mtbf_hours is None or self.mtbf_hours > 0,
            f"checkpoint.auto.mtbf_hours={self.mtbf_hours}: wanted a number above 0, or null.",
        )


@dataclass(frozen=True)
class CheckpointSettings:
    """The `checkpoint` section."""

    dir: str
    """Where committed checkpoints are. It may be on another file system than the run, which all
    nodes share."""
    local_dir: str | None
    """A directory on each node's own fast disk, where a save is committed first, as soon as all
    nodes have it there; then it goes on to `dir`. A start takes the newest one of either place that
    all ranks can read: where a node is lost with its disk, that is the newest one in `dir`.
    Absolute, and to be found again after a requeue; null goes straight to `dir`."""
    every_steps: int | None
    """A save after every step that is a multiple of it; null for none by count."""
    every_minutes: float | None
    """A save when so many minutes have passed since the last one of any cause; null for none by
    the clock. Both may be set."""
    auto: AutoSettings | None
    """Plans the time between saves from what they cost and how often the run fails, by Daly's
    formula; null for not. `checkpoint=auto` sets it."""
    keep_last: int
    """So many of the newest committed checkpoints stay."""
    keep_every_steps: int | None
    """Those whose step is a multiple of it stay for ever; null for none."""
    keep_best: KeepBestSettings | None
    """The best by a metric stay, until better ones come; null for none. Given whole:
    `checkpoint.keep_best='{metric: loss, mode: min, count: 1}'`."""
    max_bytes_per_second: float | None
    """Cap of what each rank writes to `dir`; null leaves it free."""
    commit_deadline_seconds: float
    """A save whose shards are not all durable after so long is abandoned."""
    lease_seconds: float
    """A run on another host is taken for dead when it has given no sign of life for so long. It
    gives one every 5 seconds, and says so when none of them has got through for this long."""
    writer_silence_seconds: float
    """A writer process that says nothing for so long is killed and replaced. It speaks whatever
    the disk does, so only one that was stopped, or starved of its processor, is silent."""
    max_failures: int
    """The run stops after this many failed saves in a row."""
    when_busy: Literal["wait", "skip"]
    """Where a save is due while two are still being written: `wait` for one of them, or `skip` this
    one."""
    exclude_frozen: bool
    """Do not store frozen parameters: for adapters on a large base, which every start loads. What
    they are is recorded, and another base is refused."""
    verify_on_resume: Literal["full", "size"]
    """`full` digests every shard of the checkpoint that is resumed from; `size` only looks at sizes
    and headers, and trains on with whatever a bad disk has made of the data."""
    paranoid: bool
    """Read every checkpoint back, and compare it with the state that was live at its step."""

    def __post_init__(self) -> None:
        require(
            self.local_dir is None or Path(self.local_dir).is_absolute(),
            f"checkpoint.local_dir={self.local_dir!r}: wanted an absolute path, the same on every "
            "node, or null.",
        )
        require(
            any(one is not None for one in (self.every_steps, self.every_minutes, self.auto)),
            "checkpoint.every_steps and checkpoint.every_minutes are both null: set at least one, "
            "or checkpoint=auto.",
        )
        if self.every_steps is not None:
            at_least("checkpoint.every_steps", self.every_steps, 1)
        if self.keep_every_steps is not None:
            at_least("checkpoint.keep_every_steps", self.keep_every_steps, 1)
        for name in (
            "every_minutes",
            "max_bytes_per_second",
            "commit_deadline_seconds",
            "writer_silence_seconds",
        ):
            value = getattr(self, name)
            require(
                value is None or value > 0, f"checkpoint.{name}={value}: wanted a number above 0."
            )
        # Nine beats: a shorter one would take a living run's place.
        at_least("checkpoint.lease_seconds", self.lease_seconds, _LEAST_LEASE_SECONDS)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        at_least("checkpoint.max_failures", self.max_failures, 1)
