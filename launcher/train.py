"""The Hydra entry: compose, check, then start the ranks or be one of them.

Owns the only `hydra.main`, and the last word of every process that got this far: an error with a
message ends as that message and an exit code. In a rank the settings, or the error that composing
them gave, go to all ranks first, so that one of them speaks for all (`launcher.council`).
"""

import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from launcher import explain, overrides, requeue
from launcher.config import Settings, settings_from
from launcher.errors import ConfigError
from launcher.overrides import Command
from launcher.rank import RankProcess


def main(command: Command, environ: MutableMapping[str, str], process: RankProcess | None) -> int:
    """Run this process to its end and return its exit code.

    Args:
        command: the command line, taken apart.
        environ: the process environment; HYDRA_FULL_ERROR is set in it.
        process: what makes this process a rank; None in the one that starts the ranks.
    """
    if process is None:
        return _start(command, environ)
    arguments: Sequence[str] = command.arguments
    composed: Settings | ConfigError | None
    if command.frozen is None:
        composed = compose(arguments, environ)
    else:
        composed, arguments = _thaw(command.frozen)
    if composed is None:
        return 0
    from launcher import worker

    return worker.run(composed, arguments, process)


def compose(
    arguments: Sequence[str], environ: MutableMapping[str, str]
) -> Settings | ConfigError | None:
    """Return the settings that a command line means, or the error that says why it has none.

    None means that Hydra answered the command itself, as it does for --cfg; for --help it ends the
    process.
    """
    launch_directory = Path.cwd()
    composed: list[DictConfig] = []

    @hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
    def compose_one(config: DictConfig) -> None:
        composed.append(config)  # converted outside: Hydra prints a line of its own on errors

    environ["HYDRA_FULL_ERROR"] = "1"  # raise, instead of printing and exiting with 1
    try:
        explain.refuse_options(arguments)
        sys.argv[1:] = overrides.for_hydra(arguments)
        compose_one()
        return settings_from(composed[0], launch_directory) if composed else None
    except ConfigError as error:
        return error
    except explain.COMPOSE_ERRORS as error:
        return explain.explain(error)


def _thaw(path: Path) -> tuple[Settings | ConfigError, Sequence[str]]:
    from launcher import frozen

    try:
        return frozen.thaw(path)
    except ConfigError as error:
        return error, []


def _start(command: Command, environ: MutableMapping[str, str]) -> int:
    """Start one run, or one after the other of a sweep."""
    arguments, is_sweep = overrides.split_multirun(command.arguments)
    composed: Settings | ConfigError | None = None
    if command.frozen is not None:
        composed = ConfigError(
            f"--frozen={command.frozen} is what the ranks of a submitted job are started with; to "
            "start a run, give its overrides."
        )
    elif not is_sweep:
        composed = compose(arguments, environ)
        if composed is None:
            return 0
    # Not before: `everstep --help` needs none of it.
    from launcher import start, sweep
    from launcher.wakeup import SignalQueue

    if isinstance(composed, ConfigError):
        return start.refuse(composed, environ, requeue.BAD_CONFIG)
    if composed is None:
        return sweep.run(arguments, environ, lambda words: compose(words, environ))
    return start.start(composed, arguments, environ, SignalQueue(start.SIGNALS))
