"""The steps that had no reason to move the weights: at a learning rate of 0, or left out by
DeepSpeed for an overflow. Pure.

Kept as ranges of steps, of which a long run has few: a schedule's beginning, and an overflow now
and then.
"""


class StillSteps:
    """Such steps of one attempt."""

    def __init__(self) -> None:
        self._ranges: list[list[int]] = []  # [first, end), ascending

    def add(self, step: int) -> None:
        """Note one, newer than all before."""
        if self._ranges and self._ranges[-1][1] == step:
            self._ranges[-1][1] = step + 1
        else:
            self._ranges.append([step, step + 1])

    def moving(self, after: int, until: int) -> int:
        """Return how many steps from `after` + 1 to `until` were none of them."""
        still = sum(
            max(0, min(end, until + 1) - max(first, after + 1)) for first, end in self._ranges
        )
        return until - after - still
