"""What went wrong while Hydra composed, in one message for the person who typed the command.

Hydra 1.3.8 and OmegaConf 2.3.1: an unknown key is a ConfigCompositionException whose cause carries
`full_key`; a line that the override grammar cannot read is an OverrideParseException; an unknown
option ends the process from within argparse, so that it is looked for first.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from launcher import schema, tools
from launcher.config import Settings
from launcher.errors import ConfigError, closest, nearest, one_of
from launcher.reference import choices

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)

# fmt: off
_OPTIONS_OF_HYDRA = (
    "--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p",
    "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc", "--config-path", "-cp",
    "--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun", "--info", "-i",
)
# fmt: on


def refuse_options(arguments: Iterable[str]) -> None:
    """Raise ConfigError for an argument with dashes that is no option of Hydra's."""
    for word in arguments:
        if word.startswith("-") and word.partition("=")[0] not in _OPTIONS_OF_HYDRA:
            raise ConfigError(f"{word}: there is no such option. {_how_to_write(word)}")


def explain(error: Exception) -> ConfigError:
    """Return the error that says what Hydra's says, with the nearest key or a hint."""
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"cannot read the override {error.override!r}: {_first_line(error)}\n"
            f"  {_how_to_write(error.override)}"
        )
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = [option for option in error.options if not option.startswith("_")]
        return ConfigError(f"{group}={name}: no such choice. {nearest(name, options)}")
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        place = f"{error.problem_mark.name}, line {error.problem_mark.line + 1}"
        return ConfigError(f"{place}: this is not YAML: {error.problem}.")
    for cause in _causes(error):
        if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
            suggestion = _suggestion(cause.full_key, cause.parent_node)
            return ConfigError(f"unknown setting {cause.full_key!r}. {suggestion}")
    details = [_first_line(cause) for cause in _causes(error)]
    return ConfigError("\n  ".join(dict.fromkeys(details)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _suggestion(key: str, parent: Any) -> str:
    """Say where a setting that is unknown here is known, or what is known here."""
    section, _, name = key.rpartition(".")
    if elsewhere := choices.having(key):
        return f"It comes with {one_of(elsewhere)}."
    if not section and (named := choices.named(name)):
        return f"Did you mean {one_of([repr(one) for one in named])}?"
    siblings = _keys(parent)
    if schema.is_open(Settings, section) and closest(name, siblings) is None:
        return f"To add it: +{key}=..."
    if section and not siblings:
        return f"{section} is null here: give it whole, {section}='{{{name}: ..., ...}}'."
    return nearest(name, siblings)


def _keys(node: Any) -> Sequence[str]:
    try:
        return [str(key) for key in node]
    except TypeError:
        return []


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _how_to_write(override: str) -> str:
    key, separator, value = override.partition("=")
    if override.startswith("-"):
        bare = key.lstrip("-").replace("-", "_")
        meant = [f"{name}={value or '...'}" for name in choices.named(bare) or [bare]]
        return f"A setting is given without dashes: {one_of(meant)}"
    if not separator:
        close = closest(override, tools.NAMES)
        tool = f" Did you mean the tool, everstep {close}?" if close else ""
        return f"An override has the form NAME=VALUE.{tool}"
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
