"""Batch arithmetic: global batch = micro batch x gradient accumulation x ranks, exactly.

Nothing is rounded: sizes that do not fit are refused, with the nearest ones that do.
"""

from launcher.errors import ConfigError


def accumulation_steps(*, global_size: int, micro_size: int, world_size: int) -> int:
    """Return the number of micro steps per step.

    Args:
        global_size: samples per step over all ranks.
        micro_size: samples per rank and micro step.
        world_size: number of data-parallel ranks.

    Raises:
        ConfigError: `global_size` is not a multiple of `micro_size * world_size`.
    """
    per_micro_step = micro_size * world_size
    if global_size % per_micro_step == 0:
        return global_size // per_micro_step
    lower = global_size // per_micro_step * per_micro_step
    global_sizes = [size for size in (lower, lower + per_micro_step) if size > 0]
    lines = [
        f"batch.global_size={global_size} cannot be split over the ranks: it is not a multiple of "
        f"batch.micro_size x ranks = {micro_size} x {world_size} = {per_micro_step}.",
        f"  batch.global_size that fits: {_join(global_sizes)}",
    ]
    micro_sizes = _nearest_divisors(global_size, world_size, micro_size)
    if micro_sizes:
        lines.append(
            f"  or batch.micro_size that fits {global_size} over {world_size} ranks: "
            f"{_join(micro_sizes)}"
        )
    raise ConfigError("\n".join(lines))


def _nearest_divisors(global_size: int, world_size: int, wanted: int) -> list[int]:
    """The nearest micro sizes below and above `wanted` that divide a rank's share."""
    share, rest = divmod(global_size, world_size)
    if rest or share == 0:
        return []
    fits = [size for size in range(1, share + 1) if share % size == 0]
    below = [size for size in fits if size < wanted][-1:]
    return below + [size for size in fits if size > wanted][:1]


def _join(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
