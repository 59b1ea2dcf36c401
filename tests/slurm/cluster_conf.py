"""The files of a test cluster's configuration, and the ports it may use."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from tests.slurm.cluster_job import ClusterError

FREEZER = Path("/sys/fs/cgroup/freezer")  # where version 1 cgroups track processes

_PORTS = range(20000, 31000)  # below Linux's range of ephemeral ports
_PORTS_PER_CLUSTER = 20


def write_configuration(
    directory: Path,
    *,
    port: int,
    nodes: Sequence[str],
    proctrack: str,
    kill_wait: int,
    extra_lines: Sequence[str],
) -> None:
    """Fill ``directory`` with slurm.conf, cgroup.conf, the munge key and the daemons' folders.

    ``port`` is the controller's; the nodes have the ones after it.
    """
    _make_folders(directory)
    user, host = getpass.getuser(), socket.gethostname().split(".")[0]
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={port}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        # A requeued job waits for its old credential to expire: 120 s; 5 is the least allowed.
        f"AuthInfo=socket={directory}/munge/s,cred_expire=5",
        "SchedulerParameters=sched_interval=1",
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        f"ProctrackType=proctrack/{proctrack}",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "JobRequeue=1",
        f"KillWait={kill_wait}",
        "MpiDefault=none",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        f"StateSaveLocation={directory}/state",
        f"SlurmdSpoolDir={directory}/spool/%n",
        f"SlurmctldPidFile={directory}/ctld.pid",
        f"SlurmdPidFile={directory}/slurmd-%n.pid",
        f"SlurmctldLogFile={directory}/log/slurmctld.log",
        f"SlurmdLogFile={directory}/log/slurmd-%n.log",
        *(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={own_port} CPUs=4"
            for own_port, name in enumerate(nodes, port + 1)
        ),
        f"PartitionName=main Nodes={','.join(nodes)} Default=YES State=UP PriorityTier=1",
        f"PartitionName=urgent Nodes={','.join(nodes)} State=UP PriorityTier=9",
        *extra_lines,
    ]
    (directory / "slurm.conf").write_text("\n".join(lines) + "\n")
    (directory / "cgroup.conf").write_text(
        f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={FREEZER.parent}\nCgroupAutomount=no\n"
    )


def _make_folders(directory: Path) -> None:
    for name in ("state", "log", "munge", "spool"):
        (directory / name).mkdir(mode=0o755)
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)


@contextlib.contextmanager
def reserved_ports() -> Iterator[int]:
    """Hold a block of free ports against other clusters; yield the first."""
    locks = Path(tempfile.gettempdir()) / f"everstep-test-ports-{os.getuid()}"
    locks.mkdir(mode=0o700, exist_ok=True)
    for port in range(_PORTS.start, _PORTS.stop, _PORTS_PER_CLUSTER):
        with (locks / str(port)).open("w") as lock:
            if _locked(lock) and all(map(_bindable, range(port, port + _PORTS_PER_CLUSTER))):
                yield port
                return
    raise ClusterError(f"no free block of {_PORTS_PER_CLUSTER} ports in {_PORTS}")


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _bindable(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
