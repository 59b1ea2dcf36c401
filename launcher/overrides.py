"""The command line before Hydra sees it.

Takes out what starters add: `--local_rank` from DeepSpeed's launcher; `--encoded`, one argument
that no shell can change, in which `launch=deepspeed` sends all others and some variables; and
`--frozen`, the file with the settings of a submitted job. Lets `deepspeed.<key>=value` name any
key, whether or not the configuration has it.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import ConfigError

_MULTIRUN = ("-m", "--multirun")


@dataclass(frozen=True)
class Command:
    """A command line, taken apart."""

    arguments: list[str]
    """What the user gave."""
    local_rank: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that travelled with the arguments."""
    frozen: Path | None = None
    """Where the settings are, instead of in `conf/` and in arguments."""


def parse(words: Sequence[str]) -> Command:
    """Take a command line apart.

    Raises:
        ConfigError: what a starter adds is not whole.
    """
    arguments, local_rank = split_local_rank(words)
    if arguments and arguments[0].startswith("--encoded="):
        if arguments[1:]:
            raise ConfigError(f"{arguments[0]}: nothing may follow it; found {arguments[1:]}.")
        return _decode(arguments[0], local_rank)
    if arguments and arguments[0].startswith("--frozen="):
        if arguments[1:]:
            raise ConfigError(
                f"{arguments[0]}: the settings of a submitted job are fixed, and cannot be "
                f"overridden by {' '.join(arguments[1:])}. Submit it again with what you want."
            )
        return Command([], local_rank, frozen=Path(arguments[0].partition("=")[2]))
    return Command(arguments, local_rank)


def encode(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return one argument that holds all of these, made of letters that no shell looks at."""
    content = json.dumps({"arguments": list(arguments), "environ": dict(environ)})
    return f"--encoded={base64.urlsafe_b64encode(content.encode()).decode()}"


def split_local_rank(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    """Return the arguments without `--local_rank=N` (or `--local_rank N`), and N."""
    rest: list[str] = []
    local_rank: str | None = None
    remaining = iter(arguments)
    for argument in remaining:
        name, separator, value = argument.partition("=")
        if name not in ("--local_rank", "--local-rank"):
            rest.append(argument)
        else:
            local_rank = value if separator else next(remaining, "")
    if local_rank is None:
        return rest, None
    if not local_rank.isdecimal():
        raise ConfigError(f"--local_rank={local_rank}: wanted a whole number.")
    return rest, int(local_rank)


def split_multirun(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without `-m` and `--multirun`, and whether one was there."""
    rest = [argument for argument in arguments if argument not in _MULTIRUN]
    return rest, len(rest) < len(arguments)


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra wants them."""
    return [f"++{a}" if a.startswith("deepspeed.") else a for a in arguments]


def _decode(argument: str, local_rank: int | None) -> Command:
    try:
        content = json.loads(base64.urlsafe_b64decode(argument.partition("=")[2]))
        return Command(content["arguments"], local_rank, content["environ"])
    except (binascii.Error, ValueError, KeyError) as error:
        raise ConfigError(
            f"{argument[:40]}... is not what launch=deepspeed sent: {error}"
        ) from error
