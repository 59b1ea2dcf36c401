"""Which rank is this process? From environment variables to a `Topology`.

Pure: reads a mapping, starts nothing, asks nobody. A process that no starter numbered is itself a
starter, and `detect` returns None for it. What a starter says must be complete and consistent:
half a set of variables is an error, never a world of one rank.

Sources of the variables: torchrun's documentation for RANK and its kin; DeepSpeed 0.19.8 sets
LOCAL_SIZE where torchrun sets LOCAL_WORLD_SIZE, and CROSS_RANK; Slurm's srun manual
page, where SLURM_STEP_* describe the step and SLURM_JOB_* the whole allocation.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import ConfigError

# Slurm numbers the batch script's and the interactive step from here on: those are not ranks.
_FIRST_SPECIAL_STEP = 4294967280
_PORTS = range(15000, 30000)  # below Linux's ephemeral ports (32768 and up)


@dataclass(frozen=True)
class Topology:
    """One rank's place among all ranks, in torchrun's words."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    started_by: str
    """`local`, `torchrun`, `deepspeed` or `srun`."""
    master_addr: str | None
    """Where rank 0 listens; None under srun: then `master_node` names the Slurm node."""
    master_port: int
    master_node: str | None = None

    def __post_init__(self) -> None:
        for name, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            index, count = getattr(self, name), getattr(self, size)
            if not 0 <= index < count:
                raise ConfigError(
                    f"the environment says {name}={index} of {size}={count} (started by "
                    f"{self.started_by}): a {name} is at least 0 and below {size}. "
                    "Unset stale RANK, WORLD_SIZE and LOCAL_* variables."
                )
        if self.local_world_size > self.world_size:
            raise ConfigError(
                f"the environment says local_world_size={self.local_world_size}, which is more "
                f"than world_size={self.world_size} (started by {self.started_by})."
            )


def detect(environ: Mapping[str, str]) -> Topology | None:
    """Return this process's place, or None when it is a starter.

    Raises:
        ConfigError: the variables contradict each other or are incomplete.
    """
    if "RANK" in environ and "LOCAL_RANK" in environ:
        return _from_torch_variables(environ)
    if _is_srun_rank(environ):
        return _from_srun(environ)
    _refuse_unknown_starters(environ)
    return None


def check_local_rank(argument: int, topology: Topology | None) -> None:
    """Check the `--local_rank` that DeepSpeed's launcher adds against the environment."""
    if topology is None:
        raise ConfigError(
            f"--local_rank={argument} was given, but RANK and LOCAL_RANK are not set: "
            "leave the argument out; the launcher starts its own ranks."
        )
    if argument != topology.local_rank:
        raise ConfigError(
            f"--local_rank={argument} was given, but the environment says "
            f"local_rank={topology.local_rank} (started by {topology.started_by})."
        )


def first_node(node_list: str) -> str:
    """Return the first name of a Slurm node list, such as `n[07-12,20],m3`.

    Raises:
        ConfigError: the list is empty or not in Slurm's syntax.
    """
    match = re.match(
        r"(?P<prefix>[^\[\],]*)(?:\[(?P<index>\d+)[^\]]*\](?P<suffix>[^\[\],]*))?", node_list
    )
    name = "".join(part or "" for part in match.groups()) if match else ""
    if not match or not name:
        raise ConfigError(f"SLURM_STEP_NODELIST={node_list!r} names no node.")
    return name


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Return how many tasks of a step run on its node number `node`.

    `tasks_per_node` is Slurm's run-length form: `2,1(x3)` means 2, 1, 1, 1.
    """
    end_of_group = 0
    for group in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)
        if match is None:
            break
        end_of_group += int(match[2] or 1)
        if node < end_of_group:
            return int(match[1])
    raise ConfigError(
        f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node!r} does not cover SLURM_NODEID={node}."
    )


def _from_torch_variables(environ: Mapping[str, str]) -> Topology:
    local = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "LOCAL_SIZE"
    if "EVERSTEP_STARTER_PID" in environ:
        started_by = "local"
    elif "CROSS_RANK" in environ:
        started_by = "deepspeed"
    else:
        started_by = "torchrun"
    return Topology(
        rank=_integer(environ, "RANK"),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=_integer(environ, local),
        started_by=started_by,
        master_addr=_text(environ, "MASTER_ADDR"),
        master_port=_integer(environ, "MASTER_PORT"),
    )


def _is_srun_rank(environ: Mapping[str, str]) -> bool:
    """A step of one task is a starter unless our own launcher says it made the step for a rank.

    `srun python -m launcher` with one task is how people give the launcher a whole node. The
    batch shell has SLURM_PROCID too, but no step; an interactive step has a special number.
    """
    if not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return False
    if _integer(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return False
    several = _integer(environ, "SLURM_STEP_NUM_TASKS") > 1
    return several or environ.get("EVERSTEP_STARTED_BY") == "srun"


def _from_srun(environ: Mapping[str, str]) -> Topology:
    node = _integer(environ, "SLURM_NODEID")
    address = environ.get("MASTER_ADDR")
    port = _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _step_port(environ)
    return Topology(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=_integer(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=tasks_on_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE"), node),
        started_by="srun",
        master_addr=address,
        master_port=port,
        master_node=None if address else first_node(_text(environ, "SLURM_STEP_NODELIST")),
    )


def _step_port(environ: Mapping[str, str]) -> int:
    """Every rank of a step derives the same port; another step or restart, most likely another."""
    job, step = _integer(environ, "SLURM_JOB_ID"), _integer(environ, "SLURM_STEP_ID")
    restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
    return _PORTS[(job * 31 + step * 7 + restarts * 1009) % len(_PORTS)]


def _refuse_unknown_starters(environ: Mapping[str, str]) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environ.get(name, "1") not in ("0", "1"):
            raise ConfigError(
                f"{name}={environ[name]}: an MPI launcher started this process, and each of its "
                "processes would train a world of its own. Start with `deepspeed --module "
                "launcher`, `srun python -m launcher`, torchrun, or `python -m launcher`."
            )


def _text(environ: Mapping[str, str], name: str) -> str:
    try:
        return environ[name]
    except KeyError:
        raise ConfigError(
            f"the environment numbers this process as a rank, but {name} is not set: "
            "start all ranks the same way, or unset RANK and LOCAL_RANK."
        ) from None


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number.") from None
