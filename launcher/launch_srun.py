"""`launch=srun`: start the ranks in the Slurm allocation that this process is in.

A stop reaches the ranks as SIGUSR2, which srun passes on, and by file (`launcher.starter_link`).
Never as SIGTERM: to srun that means to kill every task within 60 ms.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from launcher import outer_starter
from launcher.config import Settings
from launcher.errors import ConfigError
from launcher.launch_settings import SrunLaunch
from launcher.wakeup import SignalQueue


def ranks_per_node(launch: SrunLaunch, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return (nodes, ranks per node) that the ranks are to be started on.

    Raises:
        ConfigError: this is no allocation, or it does not say and the settings do not either.
    """
    if "SLURM_JOB_ID" not in environ or shutil.which("srun") is None:
        raise ConfigError(
            "launch=srun works inside a Slurm allocation only (salloc, or a batch script), and "
            "there is none here. To submit a job: launch=slurm."
        )
    available = int(environ.get("SLURM_JOB_NUM_NODES", "1"))
    nodes = launch.nodes or available
    if nodes > available:
        raise ConfigError(f"launch.nodes={nodes}: the allocation has only {available} nodes.")
    per_node = launch.ranks_per_node or _of_allocation(environ, available)
    if per_node is None:
        raise ConfigError(
            "launch.ranks_per_node is not set, and the allocation has neither tasks per node nor "
            "GPUs that would say: give launch.ranks_per_node=N."
        )
    return nodes, per_node


def run(
    settings: Settings,
    launch: SrunLaunch,
    arguments: Sequence[str],
    environ: MutableMapping[str, str],
    signals: SignalQueue,
) -> int:
    """Start the ranks and block to their end; return the exit code."""
    nodes, per_node = ranks_per_node(launch, environ)
    guard = _guard()

    def command(variables: Mapping[str, str]) -> list[str]:
        return [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={nodes * per_node}",
            f"--ntasks-per-node={per_node}",
            *([f"--cpus-per-task={launch.cpus_per_rank}"] if launch.cpus_per_rank else []),
            "--kill-on-bad-exit=1",
            "--wait=0",  # ranks may leave seconds apart
            "--export=ALL",
            *launch.srun_options,
            *guard,
            *(sys.executable, "-m", "launcher", *arguments),
        ]

    return outer_starter.run(
        command,
        {**environ, "EVERSTEP_STARTED_BY": "srun"},
        signals,
        run_directory=Path(settings.run.dir),
        max_restarts=launch.max_restarts,
        pass_on=_pass_on,
    )


def _guard() -> list[str]:
    """Return what keeps a USR2 from killing Python before its handler is there.

    Blocked, the signal waits; ignored, it is lost, which is second best: coreutils before 8.31
    cannot block.
    """
    blocking = ["env", "--block-signal=USR2"]
    if subprocess.run([*blocking, "true"], capture_output=True, check=False).returncode == 0:
        return blocking
    return ["bash", "-c", 'trap "" USR2; exec "$0" "$@"']


def _pass_on(srun: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(srun.pid, signal.SIGUSR2)


def _of_allocation(environ: Mapping[str, str], nodes: int) -> int | None:
    """Tasks per node that the allocation was made for, or else its GPUs per node."""
    if per_node := environ.get("SLURM_NTASKS_PER_NODE"):
        return int(per_node)
    tasks = int(environ.get("SLURM_NTASKS", "0"))
    if tasks and tasks % nodes == 0:
        return tasks // nodes
    match = re.match(r"\d+", environ.get("SLURM_GPUS_ON_NODE", ""))
    return int(match[0]) if match and int(match[0]) else None
