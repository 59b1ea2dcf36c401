"""Any sequence of saves, deaths, failing calls and resumes, against a model of what may be visible.

Deaths and errors come at any call of the file system that a writer or a take-over makes.
"""

import os
import tempfile

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.faults.injected import ERRORS, Injection
from tests.faults.sequence import KEEP_LAST, Plan, RunSequence

# A thousand fsyncs are quick in memory; a process's death loses nothing that it has written.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _injections(calls: int) -> st.SearchStrategy[Injection]:
    numbers = st.sampled_from([None, *ERRORS])
    return st.builds(Injection, at=st.integers(1, calls), number=numbers)


_plans = st.builds(
    Plan,
    saves=st.integers(0, 3),
    half=st.booleans(),
    writers=st.tuples(*[st.one_of(st.none(), _injections(120))] * 2),
    takeover=st.lists(_injections(250), max_size=2).map(tuple),
    rollback=st.sampled_from([0, 0, 0, 1]),
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(plans=st.lists(_plans, min_size=2, max_size=6))
def test_what_is_visible_is_whole_and_what_was_whole_is_found(plans: list[Plan]) -> None:
    with tempfile.TemporaryDirectory(prefix="everstep-sequence-", dir=_MEMORY) as root:
        run = RunSequence(root)
        try:
            assert run.start(0, None)
            for plan in plans:
                _one(run, plan)
        finally:
            run.close()


def _one(run: RunSequence, plan: Plan) -> None:
    """Run one attempt and the take-over after it."""
    run.fired.clear()
    before = run.steps_on_line()
    first = run.step
    sealed, told = run.seal(plan)
    committed = {report["save_id"] for report in told if report["kind"] == "committed"}
    visible = run.steps_on_line()
    if plan.writers == (None, None):
        assert committed == set(sealed), "nothing went wrong"
    assert committed <= set(sealed), "a save that no rank 0 has sealed"
    assert visible <= before | {first + count for count in range(1, plan.saves + 1)}
    assert {int(save_id.split(".")[2].removeprefix("global_step")) for save_id in committed} <= (
        visible | _pruned(visible)
    )
    event(f"writers hit: {len(run.fired)}")
    whole = visible | run.whole_steps()
    newest = max(whole | before, default=0)
    for injection in plan.takeover:
        done = run.start(0, injection)
        event(f"take-over cut short: {not done}")
        run.visible()
        if done:
            assert run.step == newest
    assert run.start(plan.rollback, None)
    if plan.rollback == 0:
        assert run.step == newest
    assert run.step in {0, *run.steps_on_line()}


def _pruned(visible: set[int]) -> set[int]:
    """Steps that retention may have taken: it keeps the newest."""
    return set(range(min(visible))) if len(visible) >= KEEP_LAST else set()
