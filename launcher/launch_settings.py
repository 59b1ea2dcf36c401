"""The `launch` section: how ranks are started, and what they are held to.

One class for each choice of `launch=`; `kind` tells them apart. Ranks read only what all choices
share (`LaunchSettings`): whoever starts them, those settings mean the same.
"""

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from launcher.errors import ConfigError
from launcher.schema import at_least

PHASES = ("start", "resume", "step", "save")

_SECONDS = (1, 60, 3600)


@dataclass(frozen=True)
class LaunchSettings:
    """What every choice of `launch` has."""

    grace_seconds: float
    """After one rank failed, the others have this long to end by themselves."""
    max_restarts: int
    """After a failure the ranks are started again so many times, where this launcher starts them:
    elsewhere that is the scheduler's."""
    max_attempts_without_progress: int
    """So many attempts in a row may end at the step they began from; then starting is refused."""
    stop_before_end_seconds: float
    """In a Slurm job the ranks save and stop so long before its time is over, even if no signal
    tells them to; 0 leaves it to signals."""
    start_timeout_minutes: float
    """From meeting the other ranks until model, data and optimizer are made. A rank that takes
    longer, here or below, logs every thread's stack and ends with a failure."""
    resume_timeout_minutes: float
    """Waiting for an older attempt to end, choosing a checkpoint and reading it."""
    step_timeout_minutes: float
    """One step, waiting for its data included."""
    save_timeout_minutes: float
    """The pause of one save, or waiting for the last one's commit."""

    def __post_init__(self) -> None:
        at_least("launch.grace_seconds", self.grace_seconds, 0)
        at_least("launch.max_restarts", self.max_restarts, 0)
        at_least("launch.max_attempts_without_progress", self.max_attempts_without_progress, 1)
        at_least("launch.stop_before_end_seconds", self.stop_before_end_seconds, 0)
        for phase in PHASES:
            minutes = getattr(self, f"{phase}_timeout_minutes")
            if minutes <= 0:
                raise ConfigError(
                    f"launch.{phase}_timeout_minutes={minutes}: wanted a number above 0."
                )


@dataclass(frozen=True)
class LocalLaunch(LaunchSettings):
    """Ranks on this machine. Ranks that others start ignore what is added here."""

    kind: Literal["local"]
    """Set by `launch=local`."""
    ranks: int | None
    """Ranks on this machine; null means one per accelerator, or two without any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _optional_at_least_one("launch.ranks", self.ranks)


@dataclass(frozen=True)
class DeepSpeedLaunch(LaunchSettings):
    """Ranks on several hosts over pdsh and ssh, started by `deepspeed`."""

    kind: Literal["deepspeed"]
    """Set by `launch=deepspeed`."""
    hostfile: str
    """A file with lines of `HOST slots=N`: N ranks on that host."""
    nodes: int | None
    """Only the first so many hosts; null for all of them."""
    include: str | None
    """Only these hosts, or slots of them, in DeepSpeed's syntax: `HOST@HOST:0,2`."""
    exclude: str | None
    """All but these, in the same syntax."""
    master_addr: str | None
    """Where the ranks reach rank 0; null asks the first host for its own address."""
    ssh_port: int | None
    """Where the hosts' ssh listens; null leaves it to the configuration of ssh."""
    host_timeout_seconds: float
    """A host that does not answer ssh in that time is an error before anything starts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _optional_at_least_one("launch.nodes", self.nodes)
        given = [name for name in ("nodes", "include", "exclude") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"launch.{' and launch.'.join(given)}: give only one of them.")
        at_least("launch.host_timeout_seconds", self.host_timeout_seconds, 1)


@dataclass(frozen=True)
class SrunLaunch(LaunchSettings):
    """Ranks in the Slurm allocation that this process is in, started by `srun`."""

    kind: Literal["srun"]
    """Set by `launch=srun`."""
    nodes: int | None
    """So many nodes of the allocation; null for all of them."""
    ranks_per_node: int | None
    """null takes the allocation's tasks per node, or else its GPUs per node."""
    cpus_per_rank: int | None
    """srun's `--cpus-per-task`; null leaves it to the allocation."""
    srun_options: tuple[str, ...]
    """Anything else that srun takes, such as `--cpu-bind=cores`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("nodes", "ranks_per_node", "cpus_per_rank"):
            _optional_at_least_one(f"launch.{name}", getattr(self, name))


@dataclass(frozen=True)
class SlurmLaunch(LaunchSettings):
    """A batch job, requeued until the run is done."""

    kind: Literal["slurm"]
    """Set by `launch=slurm`."""
    nodes: int
    """sbatch's `--nodes`."""
    ranks_per_node: int
    """sbatch's `--ntasks-per-node`: as a rule one per GPU."""
    gpus_per_node: int | None
    """sbatch's `--gpus-per-node`; null asks for none."""
    cpus_per_rank: int | None
    """sbatch's `--cpus-per-task`; null leaves it to the cluster."""
    time: str | None
    """Limit of one start of the job, in Slurm's form, such as `24:00:00` or `2-12:00`; null
    leaves it to the partition."""
    signal_lead_seconds: int
    """So long before the limit Slurm tells the ranks to save and stop; up to 30 s later."""
    partition: str | None
    """sbatch's `--partition`; null leaves it to the cluster."""
    account: str | None
    """sbatch's `--account`; null leaves it to the cluster."""
    qos: str | None
    """sbatch's `--qos`; null leaves it to the cluster."""
    array_limit: int | None
    """Of a sweep, which is submitted as an array: so many of its runs at the same time."""
    container: str | None
    """An image in which the ranks run; null for none."""
    container_runtime: Literal["pyxis", "apptainer"]
    """What runs the image: srun's plugin of that name, or `apptainer exec`."""
    container_options: tuple[str, ...]
    """Options of srun, with pyxis, or of `apptainer exec`."""
    modules: tuple[str, ...]
    """Environment modules that the batch script loads."""
    setup: tuple[str, ...]
    """Lines of shell for the batch script, before the ranks start."""
    sbatch_options: tuple[str, ...]
    """Any other option of sbatch, such as `--constraint=a100`."""
    srun_options: tuple[str, ...]
    """Options of the srun that starts the ranks."""
    python: str | None
    """The Python of the ranks; null for the one that submits."""
    dry_run: bool
    """Print the script, and submit nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("launch.nodes", self.nodes, 1)
        at_least("launch.ranks_per_node", self.ranks_per_node, 1)
        for name in ("gpus_per_node", "cpus_per_rank", "array_limit"):
            _optional_at_least_one(f"launch.{name}", getattr(self, name))
        at_least("launch.signal_lead_seconds", self.signal_lead_seconds, 1)
        for option in self.sbatch_options:
            if not option.startswith("-") or "\n" in option:
                raise ConfigError(
                    f"launch.sbatch_options: found {option!r}; wanted an option of sbatch, such as "
                    "--constraint=a100."
                )
        self._check_time()

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.nodes * self.ranks_per_node

    def _check_time(self) -> None:
        """Slurm looks for jobs to warn every 30 s; the rest is for the ranks to start."""
        if self.time is None:
            return
        seconds, least = seconds_of(self.time), self.signal_lead_seconds + 60
        if seconds < least:
            raise ConfigError(
                f"launch.time={self.time} is {seconds} s, of which "
                f"launch.signal_lead_seconds={self.signal_lead_seconds} are for stopping and up to "
                f"60 for starting: wanted {least} s or more."
            )


Launch: TypeAlias = LocalLaunch | DeepSpeedLaunch | SrunLaunch | SlurmLaunch


def seconds_of(time: str) -> int:
    """Return the seconds of a time limit in one of Slurm's forms.

    The forms of sbatch's manual page: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.

    Raises:
        ConfigError: it has another form.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise ConfigError(
            f"launch.time={time!r}: wanted one of Slurm's forms, such as 90 (minutes), 24:00:00 or "
            "2-12:00."
        )
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:  # counted from hours
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:  # minutes
        parts = [*parts, 0]
    seconds = sum(n * unit for n, unit in zip(reversed(parts), _SECONDS, strict=False))
    return int(days or 0) * 86400 + seconds


def _optional_at_least_one(name: str, value: int | None) -> None:
    if value is not None:
        at_least(name, value, 1)
