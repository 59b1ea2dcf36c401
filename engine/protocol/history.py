"""Which checkpoints a run's state descends from. Pure.

A history is the list of `(attempt, from_step)` that led to a state, oldest first: an attempt
trained from its `from_step` until the next entry's, where its successor took over. Two attempts
that both saved step 400 are told apart by it: only one of the two lies on the line.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Link(NamedTuple):
    """One attempt's stretch of a history."""

    attempt: int
    from_step: int


History = tuple[Link, ...]


def covers(history: Sequence[Link], attempt: int, step: int) -> bool:
    """Tell whether the checkpoint that `attempt` saved at `step` lies on `history`."""
    for link, successor in zip(history, [*history[1:], None], strict=True):
        if link.attempt == attempt and step >= link.from_step:
            return successor is None or step <= successor.from_step
    return False


def extend(parent: Sequence[Link], attempt: int, from_step: int) -> History:
    """Continue the history `parent` of a checkpoint of step `from_step` with a new attempt."""
    return (*parent, Link(attempt, from_step))


def from_json(value: list[list[int]]) -> History:
    """Read the `[[attempt, from_step], ...]` form of a JSON document."""
    return tuple(Link(attempt, from_step) for attempt, from_step in value)


def to_json(history: Sequence[Link]) -> list[list[int]]:
    """Return the `[[attempt, from_step], ...]` form for a JSON document."""
    return [list(link) for link in history]
