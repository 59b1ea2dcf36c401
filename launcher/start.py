"""Start a run the way `launch` says, after all that can be checked has been.

What is refused here costs nobody a queue or a GPU. Everything is light: only a submission, which
ends before the run begins, imports torch for its checks.
"""

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from engine.protocol.acquire import RunHeldError, refuse_if_held
from engine.protocol.layout import CheckpointDirectory
from launcher import hosts, launch_deepspeed, launch_srun, outer_starter, packages, requeue, spawn
from launcher.config import Settings, missing_data_files, missing_model_files
from launcher.control import refuse_leftover_stop
from launcher.errors import ConfigError, LauncherError
from launcher.launch_settings import DeepSpeedLaunch, LocalLaunch, SlurmLaunch, SrunLaunch
from launcher.monitors import settings as monitors
from launcher.wakeup import SignalQueue

SIGNALS = {*spawn.PASSED_ON, *outer_starter.STOP_SIGNALS}


def start(
    settings: Settings,
    arguments: Sequence[str],
    environ: MutableMapping[str, str],
    signals: SignalQueue,
) -> int:
    """Check one run, start its ranks or submit its job, and return the exit code. Blocks.

    Args:
        arguments: what the settings were composed from; ranks compose them again.
        signals: has taken over `SIGNALS`.
    """
    launch = settings.launch
    try:
        ranks = ranks_of(settings, environ)
        check(settings, ranks)
        if isinstance(launch, SlurmLaunch):
            from launcher import launch_slurm

            return launch_slurm.run([(settings, arguments)], launch, environ)
        refuse_if_held(CheckpointDirectory(settings.checkpoint.dir))
        if isinstance(launch, DeepSpeedLaunch):
            return launch_deepspeed.run(settings, launch, arguments, environ, signals)
        if isinstance(launch, SrunLaunch):
            return launch_srun.run(settings, launch, arguments, environ, signals)
    except (ConfigError, RunHeldError) as wrong:
        return refuse(wrong, environ, requeue.BAD_CONFIG)
    except LauncherError as failure:
        print(f"everstep: {failure}", file=sys.stderr)
        return requeue.FAILED
    return spawn.run_local(
        arguments,
        environ,
        signals,
        ranks=ranks,
        grace_seconds=launch.grace_seconds,
        max_restarts=launch.max_restarts,
    )


def ranks_of(settings: Settings, environ: Mapping[str, str]) -> int:
    """Return how many ranks will be started.

    Raises:
        ConfigError: the hostfile or the allocation does not say.
    """
    launch = settings.launch
    if isinstance(launch, LocalLaunch):
        return launch.ranks or spawn.default_ranks()
    if isinstance(launch, DeepSpeedLaunch):
        return sum(map(len, hosts.read(launch).values()))
    if isinstance(launch, SrunLaunch):
        nodes, per_node = launch_srun.ranks_per_node(launch, environ)
        return nodes * per_node
    return launch.ranks


def check(settings: Settings, ranks: int) -> None:
    """Check what can be without importing torch.

    Raises:
        ConfigError: sizes that do not fit, a folder in the way, a STOP file, files or packages that
            are not there.
    """
    settings.accumulation_steps(ranks)
    monitors.check_packages(settings.deepspeed)
    packages.check_directory(Path.cwd())
    refuse_leftover_stop(Path(settings.run.dir))
    if missing := missing_data_files(settings) + missing_model_files(settings):
        raise ConfigError("\n".join(missing))


def refuse(error: Exception, environ: MutableMapping[str, str], code: int) -> int:
    """Say what is wrong, leave the code as the verdict, and return it."""
    print(f"everstep: {error}", file=sys.stderr)
    requeue.write_status(environ, str(code))
    return code
