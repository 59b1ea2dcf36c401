"""The Hydra entry: compose, check, then start the ranks or be one of them.

Owns the only `hydra.main`, and the last word of every process that got this far: an error with a
message ends as that message and an exit code. In a rank the settings, or the error that composing
them gave, go to all ranks first, so that one of them speaks for all (`launcher.bringup`).
"""

import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from engine.protocol.acquire import RunHeldError, refuse_if_held
from engine.protocol.layout import CheckpointDirectory
from launcher import explain, overrides, packages, requeue
from launcher.config import Settings, missing_data_files, missing_model_files, settings_from
from launcher.control import refuse_leftover_stop
from launcher.errors import ConfigError
from launcher.rank import RankProcess


def main(
    arguments: Sequence[str], environ: MutableMapping[str, str], process: RankProcess | None
) -> int:
    """Run this process to its end and return its exit code.

    Args:
        arguments: the command line without the program's name, and without `--local_rank`.
        environ: the process environment; HYDRA_FULL_ERROR is set in it.
        process: what makes this process a rank; None in the one that starts the ranks.
    """
    composed = compose(arguments, environ)
    if composed is None:
        return 0
    if process is None:
        return _start(composed, arguments, environ)
    from launcher import worker

    return worker.run(composed, process)


def compose(
    arguments: Sequence[str], environ: MutableMapping[str, str]
) -> Settings | ConfigError | None:
    """Return the settings that a command line means, or the error that says why it has none.

    None means that Hydra answered the command itself, as it does for --help and --cfg.
    """
    launch_directory = Path.cwd()
    composed: list[DictConfig] = []

    @hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
    def compose_one(config: DictConfig) -> None:
        composed.append(config)  # converted outside: Hydra prints a line of its own on errors

    environ["HYDRA_FULL_ERROR"] = "1"  # raise, instead of printing and exiting with 1
    try:
        sys.argv[1:] = overrides.for_hydra(arguments)
        compose_one()
        return settings_from(composed[0], launch_directory) if composed else None
    except ConfigError as error:
        return error
    except explain.COMPOSE_ERRORS as error:
        return explain.explain(error)


def _start(
    composed: Settings | ConfigError, arguments: Sequence[str], environ: MutableMapping[str, str]
) -> int:
    from launcher import spawn

    try:
        if isinstance(composed, ConfigError):
            raise composed
        ranks = composed.launch.ranks or spawn.default_ranks()
        composed.accumulation_steps(ranks)
        packages.check_directory(Path.cwd())
        refuse_leftover_stop(Path(composed.run.dir))
        if missing := missing_data_files(composed) + missing_model_files(composed):
            raise ConfigError("\n".join(missing))
        refuse_if_held(CheckpointDirectory(composed.checkpoint.dir))
    except (ConfigError, RunHeldError) as wrong:
        print(f"everstep: {wrong}", file=sys.stderr)
        requeue.write_status(environ, str(requeue.BAD_CONFIG))
        return requeue.BAD_CONFIG
    return spawn.run_local(
        arguments,
        environ,
        ranks=ranks,
        grace_seconds=composed.launch.grace_seconds,
        max_restarts=composed.launch.max_restarts,
    )
