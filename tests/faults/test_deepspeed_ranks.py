"""Cells of the fault matrix on real DeepSpeed ranks: what is restored is the state of the step."""

import json
import signal
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.faults.points import MID_COPY, STAGED

CASES = "tests.faults.deepspeed_ranks"
KILLED = -signal.SIGKILL
WRITERS = [  # rank, moment, occurrence: all of them in the third save or its commit
    (1, "mid-write", 3),
    (1, "before the receipt's rename", 3),
    (0, "before the manifest", 3),
    (0, "before the commit's rename", 3),
    (0, "before latest", 3),
    (0, "retention: half deleted", 1),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks have been through all writers' faults, and then died in the middle of a copy."""
    root = tmp_path_factory.mktemp("faults")
    run_ranks(
        f"{CASES}:writers_die_then_trainers",
        2,
        exit_code=KILLED,
        directory=str(root),
        faults=WRITERS,
        moment=MID_COPY,
    )
    return root


@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_that_dies_at_a_moment_of_a_save_costs_nothing(rank: int, root: Path) -> None:
    outcomes = json.loads((root / f"outcomes.{rank}").read_text())
    for (victim, moment, _), outcome in zip(WRITERS, outcomes, strict=True):
        wanted = {"fired": True, "restarted": int(rank == victim), "step": 4, "same": True}
        assert outcome == wanted, moment


def test_trainers_that_die_in_the_middle_of_a_copy_and_right_after_it(root: Path) -> None:
    arguments = {"directory": str(root), "moment": STAGED}
    run_ranks(f"{CASES}:trainers_die", 2, exit_code=KILLED, **arguments)
    fired = sorted(path.name for path in root.glob("fired.*"))
    assert fired == [f"fired.{moment}.{rank}" for moment in (MID_COPY, STAGED) for rank in (0, 1)]
    # Steps 1 and 2 of the first attempt; then 3, 4 and, staged, 5.
    for outcome in run_ranks(f"{CASES}:resumes", 2, directory=str(root)):
        assert outcome == {"step": 5, "same": True}
