"""The settings of saving and resuming, checked when they are made."""

from dataclasses import dataclass, field

from engine.protocol.acquire import Lease


@dataclass(frozen=True)
class CheckpointOptions:
    """Settings of a `Checkpointer`.

    keep_last                committed tags of the run's own history that are kept, at least 1
    commit_deadline_seconds  from a save's staging to its last receipt; later it is abandoned
    max_failures             saves that fail in a row before the run stops with the error
    bytes_per_second         cap of each writer's disk writes; None leaves them free
    lease                    when an attempt on another host is taken for dead
    log_directory            for the writers' logs; None puts them into the attempt's directory
    """

    keep_last: int = 2
    commit_deadline_seconds: float = 600.0
    max_failures: int = 3
    bytes_per_second: float | None = None
    lease: Lease = field(default_factory=Lease)
    log_directory: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("keep_last", 1), ("max_failures", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted {least} or more")
        if self.commit_deadline_seconds <= 0:
            raise ValueError(
                f"commit_deadline_seconds is {self.commit_deadline_seconds}, wanted more than 0"
            )
