"""A real Slurm on loopback: controller, node daemons and munge, private to one directory.

``SlurmCluster`` starts its daemons as children of the test process and ends only those, and the
jobs it ran. Several clusters live side by side: each holds a block of ports under a lock, and its
node names carry the first of them, because clusters with cgroup tracking and equal node names kill
each other's tasks. Every node is this host. It never touches a Slurm that the machine has of its
own: every command runs with this cluster's SLURM_CONF and without any other Slurm variable.

Tested with Slurm 22.05 (Debian 12). Root is needed for cgroup tracking only.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tests import daemons
from tests.slurm.cluster_conf import FREEZER, reserved_ports, write_configuration
from tests.slurm.cluster_job import ClusterError, Job, wait_for

Proctrack = Literal["linuxproc", "cgroup"]

_COMMAND_SECONDS = 60
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue")


def missing_programs() -> list[str]:
    """Name the programs a cluster needs and this machine lacks."""
    return daemons.missing(_PROGRAMS)


def cgroup_obstacle() -> str | None:
    """Say why this machine cannot track tasks by cgroup; None where it can."""
    if os.geteuid() != 0:
        return "proctrack/cgroup needs root"
    if not os.access(FREEZER, os.W_OK):
        return f"{FREEZER} is not there or not writable (version 2 hierarchies were not tried)"
    return None


class SlurmCluster:
    """One controller and ``nodes`` node daemons; use as a context manager.

    Args:
        proctrack: How Slurm finds a task's processes. "cgroup", the usual choice in the field,
            kills all that a task left behind as soon as the task has ended; "linuxproc" lets
            detached processes live.
        nodes: Number of nodes, four CPUs each (the machine may have fewer: nothing is bound).
        kill_wait: Seconds from SIGTERM to SIGKILL.
        extra_conf: Lines to add to slurm.conf.
    """

    def __init__(
        self,
        *,
        proctrack: Proctrack = "linuxproc",
        nodes: int = 2,
        kill_wait: int = 10,
        extra_conf: Sequence[str] = (),
    ) -> None:
        self._proctrack = proctrack
        self._node_count = nodes
        self._kill_wait = kill_wait
        self._extra_conf = tuple(extra_conf)
        self._closing = contextlib.ExitStack()
        self._jobs = 0

    def __enter__(self) -> SlurmCluster:
        with contextlib.ExitStack() as stack:
            # Not pytest's tmp_path: munged refuses a directory that others cannot search, and a
            # socket's path has 108 bytes.
            root = tempfile.mkdtemp(prefix="slurm-")
            stack.callback(shutil.rmtree, root, ignore_errors=True)
            self.directory = Path(root)
            self.directory.chmod(0o755)
            port = stack.enter_context(reserved_ports())
            self.nodes = [f"e{port}n{index}" for index in range(1, self._node_count + 1)]
            conf = self.directory / "slurm.conf"
            self.environment = _clean_environment(conf)
            write_configuration(
                self.directory,
                port=port,
                nodes=self.nodes,
                proctrack=self._proctrack,
                kill_wait=self._kill_wait,
                extra_lines=self._extra_conf,
            )
            stack.callback(self._remove_cgroups)
            stack.callback(daemons.kill_marked, "SLURM_CONF", conf)
            self._start_daemons(stack)
            stack.callback(self._cancel_everything)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.close()

    def run(
        self,
        *command: str | Path,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        seconds: float = _COMMAND_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run one command against this cluster; raise ClusterError with its output if it fails."""
        program, *arguments = map(str, command)
        done = subprocess.run(
            # Found here, for ``environment`` may bring a PATH for the job that lacks it.
            [daemons.find(program) or program, *arguments],
            env=self.environment | dict(environment or {}),
            cwd=cwd or self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
        if check and done.returncode != 0:
            raise ClusterError(
                f"{' '.join(map(str, command))}: exit code {done.returncode}\n"
                f"{done.stdout}{done.stderr}"
            )
        return done

    def srun(
        self,
        *command: str | Path,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        seconds: float = _COMMAND_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command``, after options if any, as one task on every node, as a job of its own."""
        size = str(self._node_count)
        return self.run(
            *("srun", "--nodes", size, "--ntasks", size, *command),
            check=check,
            environment=environment,
            cwd=cwd,
            seconds=seconds,
        )

    def sbatch(
        self,
        script: Path,
        *arguments: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Job:
        """Submit ``script`` for one task on every node. Options given override the script's own."""
        self._jobs += 1
        size = str(self._node_count)
        log = self.directory / f"job-{self._jobs}.log"
        done = self.run(
            *("sbatch", "--parsable", "--nodes", size, "--ntasks", size, "--output", log),
            *(*options, str(script), *arguments),
            environment=environment,
            cwd=cwd,
        )
        return Job(self, done.stdout.strip(), log)

    def _start_daemons(self, stack: contextlib.ExitStack) -> None:
        directory = self.directory
        munge = directory / "munge"
        self._start(
            stack,
            *("munged", "--foreground", f"--socket={munge}/s", f"--key-file={directory}/munge.key"),
            *(f"--pid-file={munge}/pid", f"--seed-file={munge}/seed"),
            f"--log-file={directory}/log/munged.log",
        )
        wait_for((munge / "s").is_socket, 30, "munged listens", self.logs)
        self._start(stack, "slurmctld", "-D", "-c")
        for name in self.nodes:
            self._start(stack, "slurmd", "-D", "-c", "-N", name)
        wait_for(self._all_idle, 60, "all nodes are idle", self.logs)

    def _start(self, stack: contextlib.ExitStack, *command: str) -> None:
        with (self.directory / "log" / "daemons.log").open("a") as output:
            daemons.start(stack, command, environment=self.environment, output=output)

    def _all_idle(self) -> bool:
        done = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False)
        states = {tuple(line.split()) for line in done.stdout.splitlines()}
        return states == {(name, "idle") for name in self.nodes}

    def _cancel_everything(self) -> None:
        def empty() -> bool:
            done = self.run("squeue", "--noheader", check=False)
            return done.returncode == 0 and not done.stdout.strip()

        self.run("scancel", "--user", getpass.getuser(), check=False)
        # What still runs after an impatient moment is killed; KillWait would bound it as well.
        with contextlib.suppress(ClusterError):
            wait_for(empty, 2, "no job is left")
        self.run("scancel", "--signal=KILL", "--full", "--user", getpass.getuser(), check=False)
        with contextlib.suppress(ClusterError):
            wait_for(empty, self._kill_wait + 8, "no job is left")

    def _remove_cgroups(self) -> None:
        for name in self.nodes:
            for directory, _, _ in os.walk(FREEZER / f"slurm_{name}", topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)

    def logs(self) -> str:
        """The last lines of every daemon's log, to show with a failure."""
        parts = []
        for path in sorted((self.directory / "log").iterdir()):
            tail = "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            parts.append(f"--- {path.name}\n{tail}")
        return "\n".join(parts)


def _clean_environment(conf: Path) -> dict[str, str]:
    """This process's environment without any other Slurm's variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
    return kept | {"SLURM_CONF": str(conf), "PATH": daemons.PATH}
