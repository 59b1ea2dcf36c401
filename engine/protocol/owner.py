"""Who runs an attempt, and whether that process is still there.

A process is named by host, boot, pid namespace, pid and start time, so that a reused pid or a
rebooted host is not taken for it. Across hosts nothing of this can be looked up: there, the beats
that an attempt's rank 0 writer leaves in the attempt's directory are watched for change.
"""

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.format import sealed

RUNNING = "running"
DRAINING = "draining"


def start_ticks(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot; None if it is not alive."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # proc(5): state is field 3, starttime 22


@dataclass(frozen=True)
class Place:
    """Where pids mean something: one boot of one host, in one pid namespace."""

    host: str
    boot_id: str
    pid_namespace: str

    @classmethod
    def here(cls) -> "Place":
        """Return this process's place."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        return cls(socket.gethostname(), boot_id, os.readlink("/proc/self/ns/pid"))


@dataclass(frozen=True)
class Owner:
    """The rank 0 trainer of an attempt, as `owner.json` holds it.

    `nonce` is new for every attempt and goes into every save id: no two attempts share one, even
    where two directories were copied into each other. `slurm_job` and `slurm_restarts` are empty
    and 0 outside Slurm.
    """

    place: Place
    pid: int
    start_ticks: int
    world_size: int
    slurm_job: str = ""
    slurm_restarts: int = 0
    attempt: int = -1
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))

    @classmethod
    def this_process(cls, world_size: int, environment: Mapping[str, str]) -> "Owner":
        """Describe the calling process; `environment` may hold Slurm's job and restart count."""
        ticks = start_ticks(os.getpid())
        assert ticks is not None, "a running process has a start time"
        return cls(
            Place.here(),
            os.getpid(),
            ticks,
            world_size,
            environment.get("SLURM_JOB_ID", ""),
            int(environment.get("SLURM_RESTART_COUNT", "0")),
        )

    def to_bytes(self) -> bytes:
        """Return the document of owner.json."""
        return sealed.dumps(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Owner":
        """Read owner.json. Raises engine.format.FormatError when it is damaged."""
        value: dict[str, Any] = sealed.loads(data, path)
        return cls(**{**value, "place": Place(**value["place"])})

    def is_requeued_as(self, other: "Owner") -> bool:
        """Tell whether `other` is a later start of the same Slurm job: Slurm has ended this one."""
        same_job = bool(self.slurm_job) and self.slurm_job == other.slurm_job
        return same_job and other.slurm_restarts > self.slurm_restarts


@dataclass(frozen=True)
class Beat:
    """A sign of life of an attempt's rank 0 writer; all of it is in the file's name."""

    count: int
    state: str
    pid: int
    start_ticks: int
    host: str

    def name(self) -> str:
        """Return the file name that carries this beat."""
        return f"beat.{self.count:08d}.{self.state}.{self.pid}.{self.start_ticks}.{self.host}"

    @staticmethod
    def names_of(listed: list[str]) -> list[str]:
        """Return those of the names of an attempt's directory that are beats."""
        return [name for name in listed if name.startswith("beat.")]

    @classmethod
    def newest(cls, listed: list[str]) -> "Beat | None":
        """Return the newest beat among the names of an attempt's directory."""
        names = sorted(cls.names_of(listed))
        if not names:
            return None
        _, count, state, pid, ticks, host = names[-1].split(".", 5)
        return cls(int(count), state, int(pid), int(ticks), host)
