"""History: which tags a run descends from."""

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.history import Link, covers, extend, from_json, to_json

LINE = (Link(0, 0), Link(2, 40), Link(5, 70))


def test_an_attempt_is_covered_from_its_first_step_to_its_successors() -> None:
    assert [step for step in range(0, 100, 10) if covers(LINE, 0, step)] == [0, 10, 20, 30, 40]
    assert [step for step in range(0, 100, 10) if covers(LINE, 2, step)] == [40, 50, 60, 70]
    assert [step for step in range(0, 100, 10) if covers(LINE, 5, step)] == [70, 80, 90]


def test_an_attempt_that_led_nowhere_is_not_covered() -> None:
    assert not any(covers(LINE, attempt, step) for attempt in (1, 3, 4, 6) for step in range(100))


def test_a_rollback_uncovers_what_came_after_it() -> None:
    line = extend(LINE[:2], 9, 50)
    assert covers(line, 2, 50)
    assert not covers(line, 2, 60)
    assert not covers(line, 5, 80)
    assert covers(line, 9, 60)


def test_the_json_form_comes_back_the_same() -> None:
    assert from_json(to_json(LINE)) == LINE


@st.composite
def lineages(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Attempts in order, each with the step it trains to and the one its successor takes."""
    stretches, start = [], 0
    for attempt in range(draw(st.integers(1, 6))):
        reached = start + draw(st.integers(0, 5))
        taken = draw(st.integers(start, reached))
        stretches.append((attempt, reached, taken))
        start = taken
    return stretches


@given(lineages())
def test_exactly_the_steps_that_the_state_went_through_are_covered(
    lineage: list[tuple[int, int, int]],
) -> None:
    line: tuple[Link, ...] = ()
    start, descended = 0, set()
    for attempt, reached, taken in lineage:
        line = extend(line, attempt, start)
        is_last = attempt == len(lineage) - 1
        end = reached if is_last else taken
        descended |= {(attempt, step) for step in range(start, end + 1)}
        start = taken
    saved = {(a, step) for a, reached, _ in lineage for step in range(reached + 1)}
    found = {(attempt, step) for attempt, step in saved if covers(line, attempt, step)}
    assert found == descended & saved
