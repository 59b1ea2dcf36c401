"""`launch=deepspeed`: start the ranks on the hosts of a hostfile, with DeepSpeed's own starter.

The overrides travel as one argument that no shell on the way can change (`launcher.overrides`). A
stop travels by file (`launcher.starter_link`): a signal to DeepSpeed's runner would `pkill -f` its
launchers, whoever's they are, on every host.
"""

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from launcher import hosts, outer_starter, overrides
from launcher.config import Settings
from launcher.launch_settings import DeepSpeedLaunch
from launcher.wakeup import SignalQueue


def run(
    settings: Settings,
    launch: DeepSpeedLaunch,
    arguments: Sequence[str],
    environ: MutableMapping[str, str],
    signals: SignalQueue,
) -> int:
    """Start the ranks and block to their end; return the exit code.

    Raises:
        HostError: a host does not answer; nothing was started.
    """
    hosts.check(hosts.read(launch), launch, Path.cwd())

    def command(variables: Mapping[str, str]) -> list[str]:
        return [
            *(sys.executable, "-m", "deepspeed.launcher.runner", "--log_level=warning"),
            f"--hostfile={Path(launch.hostfile).expanduser()}",
            "--force_multi",  # it would start the ranks of one single host here, whichever it is
            "--no_ssh_check",
            *_selection(launch),
            *([f"--master_addr={launch.master_addr}"] if launch.master_addr else []),
            *([f"--ssh_port={launch.ssh_port}"] if launch.ssh_port else []),
            *("--module", "launcher", overrides.encode(arguments, variables)),
        ]

    return outer_starter.run(
        command,
        environ,
        signals,
        run_directory=Path(settings.run.dir),
        max_restarts=launch.max_restarts,
        is_noise=_is_noise,
    )


def _is_noise(line: bytes) -> bool:
    """DeepSpeed's launchers tell their own lives; over pdsh no option of theirs stops it."""
    return b" [INFO] [launch.py:" in line


def _selection(launch: DeepSpeedLaunch) -> list[str]:
    chosen = {
        "num_nodes": launch.nodes,
        "include": launch.include,
        "exclude": launch.exclude,
    }
    return [f"--{name}={value}" for name, value in chosen.items() if value is not None]
