"""How many steps between two had reason to move the weights."""

from hypothesis import given
from hypothesis import strategies as st

from launcher.guards.still_steps import StillSteps


@given(st.sets(st.integers(1, 40)), st.integers(0, 40), st.integers(0, 40))
def test_it_counts_as_one_would_step_by_step(still: set[int], one: int, other: int) -> None:
    steps = StillSteps()
    for step in sorted(still):
        steps.add(step)
    after, until = sorted((one, other))
    assert steps.moving(after, until) == len(set(range(after + 1, until + 1)) - still)
