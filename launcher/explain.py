"""What went wrong while Hydra composed, in one message for the person who typed the command.

Hydra 1.3.8 and OmegaConf 2.3.1: an unknown key is a ConfigCompositionException whose cause carries
`full_key`; a line that the override grammar cannot read is an OverrideParseException.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from launcher.errors import ConfigError, nearest

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException)


def explain(error: Exception) -> ConfigError:
    """Return the error that says what Hydra's says, with the nearest key or a hint."""
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"cannot read the override {error.override!r}: {_first_line(error)}\n"
            f"  {_how_to_write(error.override)}"
        )
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return ConfigError(f"{group}={name}: no such choice. {nearest(name, error.options)}")
    for cause in _causes(error):
        if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
            siblings = _keys(cause.parent_node)
            return ConfigError(
                f"unknown setting {cause.full_key!r}. {nearest(str(cause.key), siblings)}"
            )
    details = [_first_line(cause) for cause in _causes(error)]
    return ConfigError("\n  ".join(dict.fromkeys(details)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _keys(node: Any) -> Sequence[str]:
    try:
        return [str(key) for key in node]
    except TypeError:
        return []


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _how_to_write(override: str) -> str:
    key, separator, value = override.partition("=")
    if not separator:
        return "An override has the form NAME=VALUE."
    if value.startswith("[") and value.endswith("]"):
        items = ", ".join(f'"{item.strip()}"' for item in value[1:-1].split(","))
        return (
            "Items of a list that hold = : or - are quoted, and the whole for the shell: "
            f"'{key}=[{items}]'"
        )
    return (
        "A value that holds = , : ~ [ ] { } or spaces is quoted twice, for the shell and for "
        f"Hydra: '{key}=\"{value}\"'"
    )
