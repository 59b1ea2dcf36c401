"""Which monitors a run feeds: the sections that DeepSpeed's configuration has for them.

DeepSpeed 0.19.8 would feed them itself, from rank 0: the learning rate of the step to come, over
samples, in a file or a run of its own for every attempt, and an error of theirs ends the training.
So these sections are checked with DeepSpeed's others, but never reach it. Light; no monitor is
imported.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError

TENSORBOARD, CSV, WANDB, COMET = "tensorboard", "csv_monitor", "wandb", "comet"
SECTIONS = (TENSORBOARD, CSV, WANDB, COMET)

_DIRECTORIES = {TENSORBOARD: "tensorboard", CSV: "csv"}
_PACKAGES = {
    TENSORBOARD: ("tensorboard", "pip install 'everstep[tensorboard]'"),
    WANDB: ("wandb", "pip install wandb"),
    COMET: ("comet_ml", "pip install 'comet_ml>=3.41'"),
}


def enabled(deepspeed: Mapping[str, Any]) -> list[str]:
    """Return the monitors that are switched on in the `deepspeed` section."""
    return [name for name in SECTIONS if name in deepspeed and deepspeed[name].get("enabled")]


def check(deepspeed: Mapping[str, Any]) -> None:
    """Refuse what would quietly leave a monitor off, or write to a place that nobody named.

    Raises:
        ConfigError: names the key, and what is wanted.
    """
    for name in SECTIONS:
        section = deepspeed.get(name, {})
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"deepspeed.{name}: found {section!r}; wanted a section. To switch it on, give "
                f"deepspeed.{name}.enabled=true."
            )
        for key, kind, wanted in (
            ("enabled", bool, "true or false"),
            ("output_path", str, "a directory"),
            ("job_name", str, "the name of a directory"),
        ):
            if key in section and not isinstance(section[key], kind):
                raise ConfigError(
                    f"deepspeed.{name}.{key}: found {section[key]!r}; wanted {wanted}."
                )


def check_packages(deepspeed: Mapping[str, Any]) -> None:
    """Refuse a monitor whose package this Python does not have.

    Raises:
        ConfigError: says how to install it.
    """
    for name in filter(_PACKAGES.get, enabled(deepspeed)):
        package, install = _PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"deepspeed.{name}.enabled=true needs the package {package}, which is not "
                f"installed: {install}, or leave the monitor out."
            )


def with_places(
    deepspeed: Mapping[str, Any], run: str, run_directory: str, launch_directory: Path
) -> dict[str, Any]:
    """Return the section with the directory of every monitor that writes files filled in.

    DeepSpeed's default is the working directory, under one name for all runs. Here it is the run
    directory; under an `output_path` that was given, each run has a directory of its name.

    Args:
        run: its name.
        launch_directory: what `run_directory` and an `output_path` may be relative to.
    """
    completed = dict(deepspeed)
    for name in enabled(deepspeed):
        if name in _DIRECTORIES:
            section = deepspeed[name]
            given = section.get("output_path")
            path = launch_directory / Path(given or run_directory).expanduser()
            job_name = section.get("job_name") or (run if given else _DIRECTORIES[name])
            completed[name] = {**section, "output_path": str(path), "job_name": job_name}
    return completed


def for_deepspeed(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed configuration without the sections of monitors."""
    return {key: value for key, value in deepspeed.items() if key not in SECTIONS}
