"""The settings of a submitted job, kept in a file: the job uses them whatever happens to `conf/`.

A file holds what a command line composed to, and that command line. It is JSON, in which floats
come back as they were; the classes of `launcher.config` check it again when it is read.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from launcher import schema
from launcher.config import Settings
from launcher.errors import ConfigError


def freeze(settings: Settings, arguments: Sequence[str], path: Path) -> None:
    """Write the settings, and the arguments that they came from."""
    content = {"arguments": list(arguments), "settings": settings.as_dict()}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def thaw(path: Path) -> tuple[Settings, list[str]]:
    """Return the settings, and the arguments that they came from.

    Raises:
        ConfigError: the file is not there, or not one that `freeze` wrote.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        arguments: list[str] = content["arguments"]
        return schema.build(Settings, content["settings"], ""), arguments
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--frozen={path}: cannot read the settings of a submitted job there ({error}). Every "
            "node must see the run directory; otherwise submit the job again."
        ) from error
