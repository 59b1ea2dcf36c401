"""The text of a batch job: `#SBATCH` lines and shell from the settings, then `slurm/train.sbatch`.

What happens after the ranks have ended is written and tested once, in that file: here its head is
replaced. `launcher/train.sbatch` is a link to it, so that it is installed with the package.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.launch_settings import SlurmLaunch

_BODY_BEGINS = "# From here on this is the text of every job"


def render(launch: SlurmLaunch, *, name: str, log: Path, frozen: Sequence[Path]) -> str:
    """Return the script of a job.

    Args:
        name: of the job.
        log: where Slurm writes the output; may hold Slurm's patterns, such as %j.
        frozen: the settings of the run, or those of each task of an array.
    """
    lines = [f"#SBATCH {option}" for option in _options(launch, name, log, len(frozen))]
    shell = [
        *([f"module load {shlex.join(launch.modules)}"] if launch.modules else []),
        *launch.setup,
        f"export EVERSTEP_PYTHON={shlex.quote(launch.python or sys.executable)}",
        f"export EVERSTEP_STATUS_DIR={shlex.quote(str(log.parent))}",
        "export EVERSTEP_STARTED_BY=srun",  # a task is a rank even where it is the only one
        f"srun_options=({shlex.join(_srun_options(launch))})",
        f"within=({shlex.join(_within(launch))})",
        *_settings(frozen),
    ]
    return "\n".join(["#!/bin/bash", *lines, "", *shell, "", _body()])


def _options(launch: SlurmLaunch, name: str, log: Path, tasks: int) -> list[str]:
    values = {
        "job-name": name,
        "output": str(log),
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "nodes": launch.nodes,
        "ntasks-per-node": launch.ranks_per_node,
        "gpus-per-node": launch.gpus_per_node,
        "cpus-per-task": launch.cpus_per_rank,
        "time": launch.time,
        "signal": f"USR2@{launch.signal_lead_seconds}",
        "array": _array(launch, tasks),
    }
    given = [f"--{key}={_quoted(str(v))}" for key, v in values.items() if v is not None]
    return [*given, "--requeue", "--open-mode=append", *launch.sbatch_options]


def _array(launch: SlurmLaunch, tasks: int) -> str | None:
    if tasks == 1:
        return None
    limit = "" if launch.array_limit is None else f"%{launch.array_limit}"
    return f"0-{tasks - 1}{limit}"


def _quoted(value: str) -> str:
    """Quote as sbatch reads its lines: only spaces need it, and `%` and brackets stay."""
    return f'"{value}"' if " " in value else value


def _srun_options(launch: SlurmLaunch) -> list[str]:
    options = list(launch.srun_options)
    if launch.container is not None and launch.container_runtime == "pyxis":
        options += [f"--container-image={launch.container}", *launch.container_options]
    return options


def _within(launch: SlurmLaunch) -> list[str]:
    if launch.container is None or launch.container_runtime != "apptainer":
        return []
    return ["apptainer", "exec", *launch.container_options, launch.container]


def _settings(frozen: Sequence[Path]) -> list[str]:
    """The command line of the ranks: where their settings are."""
    if len(frozen) == 1:
        return [f"set -- {shlex.quote(f'--frozen={frozen[0]}')}"]
    words = " ".join(shlex.quote(f"--frozen={path}") for path in frozen)
    return [f"tasks=({words})", 'set -- "${tasks[SLURM_ARRAY_TASK_ID]}"']


def _body() -> str:
    text = Path(__file__).with_name("train.sbatch").read_text(encoding="utf-8")
    return _BODY_BEGINS + text.partition(_BODY_BEGINS)[2]
