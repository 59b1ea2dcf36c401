"""The command line before Hydra sees it.

Takes out `--local_rank`, which DeepSpeed's launcher adds; lets `deepspeed.<key>=value` name any
key, whether or not the configuration has it; refuses multirun, which would start one run's ranks
for another run's settings.
"""

from collections.abc import Sequence

from launcher.errors import ConfigError


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


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra wants them.

    Raises:
        ConfigError: `-m` or `--multirun` is among them.
    """
    for argument in arguments:
        if argument in ("-m", "--multirun"):
            raise ConfigError(
                f"{argument}: several runs from one command are not supported. "
                "Give one command per run, each with a run.name of its own."
            )
    return [f"++{a}" if a.startswith("deepspeed.") else a for a in arguments]
