"""How attempts end, and what is drawn for each of them."""

import enum
import random
from dataclasses import replace

from tests.protocol.driver.trainer import Settings

KEEP_LAST = 2
_BEAT_SECONDS = 0.04
_LOCAL_CHANCE = 0.8


class Fault(enum.Enum):
    """How an attempt ends."""

    ALL = "all trainers"
    ONE = "one trainer, then the others"
    WRITER_0 = "rank 0's writer, later the trainers"
    WRITER_ANY = "a writer, later the trainers"
    ALL_AND_WRITER_0 = "all trainers, then rank 0's writer"
    ALL_AND_WRITER_ANY = "all trainers, then a writer"
    ALL_AND_WRITERS = "all trainers, then all writers"
    STAGING = "a trainer in the middle of a copy"
    EARLY = "all before they train"
    CLEAN = "a clean end"
    ZOMBIE = "all stopped, and woken beside the next"

    @property
    def kills_writer(self) -> bool:
        return "WRITER" in self.name


_KILLS = [fault for fault in Fault if fault is not Fault.ZOMBIE] + [Fault.ALL] * 2
_ZOMBIES = [Fault.ZOMBIE] * 6 + [Fault.ALL, Fault.ONE, Fault.WRITER_0, Fault.CLEAN, Fault.EARLY]


def draw_fault(draw: random.Random, with_zombies: bool, beside_zombies: bool, local: bool) -> Fault:
    """Draw how the next attempt ends; one that runs beside zombies must get to train.

    With `local`, more often so that something is left in the local tier alone.
    """
    faults = _ZOMBIES if with_zombies else _KILLS
    if local:
        faults = faults + [Fault.ALL_AND_WRITERS] * 4
    return draw.choice([f for f in faults if f is not Fault.EARLY or not beside_zombies])


class DiskFault(enum.Enum):
    """What becomes of one node's own disk between two attempts."""

    NONE = "nothing"
    LOST = "it is gone with its node"
    CORRUPT = "a bit of a file there has flipped"
    TRUNCATED = "a file there is short"


def draw_disk_fault(draw: random.Random) -> DiskFault:
    """Draw what happens to a disk, one time in four."""
    return draw.choice([DiskFault.NONE] * 9 + [f for f in DiskFault if f is not DiskFault.NONE])


def draw_settings(
    draw: random.Random,
    fault: Fault,
    *,
    key: int,
    directory: str,
    logs: str,
    host: str,
    lease_seconds: float,
    rollback: bool,
    disks: list[str] | None,
) -> list[Settings]:
    """Draw the settings of all ranks of one attempt.

    `disks` are the nodes' own, one for each rank that there may be; None without a local tier.
    """
    # What is only in the local tier serves no other number of ranks: there it changes seldom.
    world_size = draw.choice([1, 2, 2, 3] if disks is None else [1, *[2] * 8, 3])
    is_local = disks is not None and (fault is Fault.CLEAN or draw.random() < _LOCAL_CHANCE)
    rank_0 = Settings(
        key=key,
        rank=0,
        world_size=world_size,
        directory=directory,
        logs=logs,
        seed=0,
        host=host,
        lease_seconds=lease_seconds,
        beat_seconds=_BEAT_SECONDS,
        # A killed writer's receipts never come: rank 0's waits as long as this.
        deadline_seconds=2.0 if fault.kills_writer else 60.0,
        keep_last=KEEP_LAST,
        numel=draw.choice([20_001, 100_003, 500_009]) * world_size + draw.randrange(99),
        pace_seconds=draw.choice([0.01, 0.05, 0.1]),
        poll_chance=draw.choice([0.0, 0.2, 1.0]),
        # With a slow disk behind it, the local tier is ahead by a save or two.
        bytes_per_second=draw.choice([4e6, 4e6, 1e6] if is_local else [None, None, 20e6, 4e6]),
        rollback=draw.randrange(1 << 30) if rollback else None,
        saves=draw.randrange(1, 6) if fault is Fault.CLEAN else None,
        dies_in_stage=None,
        forks=False,
        disks=disks if is_local else None,
    )
    dies = draw.randrange(world_size) if fault is Fault.STAGING else None
    return [
        replace(
            rank_0,
            rank=rank,
            seed=draw.randrange(1 << 30),
            dies_in_stage=draw.randrange(1, 8) if rank == dies else None,
            forks=draw.random() < 0.4,
        )
        for rank in range(world_size)
    ]
