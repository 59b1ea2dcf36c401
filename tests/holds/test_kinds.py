"""Runs of every kind that are resumed in the middle end with the bits of one that never stopped.

Masters, every key of the optimizer's state, its scalars, param groups, training copies, frozen
parameters, buffers, scheduler, loss scaler, counters and generators, each by name.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.holds.cases import differences
from tests.holds.kinds import KINDS
from tests.holds.state import joined

CASES = "tests.holds.cases"

# DeepSpeed compiles its CPUAdam once per machine: more than a minute.
pytestmark = pytest.mark.timeout(900)

Results = list[dict[str, Any]]
"""By rank, and then by kind."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where every kind has a directory of its own, by its number."""
    return str(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="module")
def results(directory: str) -> Results:
    """All kinds in one process tree, two ranks."""
    return _run("continues_exactly", 2, directory, list(KINDS))


@pytest.fixture(scope="module")
def elsewhere(directory: str, results: Results) -> Results:
    """What three ranks resume of what the two have saved."""
    return _run("resumes_elsewhere", 3, directory, list(KINDS))


def _run(case: str, world_size: int, directory: str, names: list[str]) -> Results:
    return run_ranks(
        f"{CASES}:{case}", world_size, timeout_seconds=800, directory=directory, names=names
    )


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_resumes_bit_for_bit(name: str, results: Results) -> None:
    for rank, result in enumerate(results):
        _check(result[name], rank)
    if "fp16" in name:
        assert [result[name]["skipped"] for result in results] == [1, 1]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_resumes_at_another_world_size(
    name: str, results: Results, elsewhere: Results
) -> None:
    saved = joined([result[name]["slices"] for result in results])
    assert differences(saved, joined([result[name] for result in elsewhere])) == []


@pytest.mark.parametrize("world_size", [1, 4])
def test_few_elements_on_many_ranks_and_all_on_one(world_size: int, tmp_path: Path) -> None:
    name = "bf16 AdamW"
    results = _run("continues_exactly", world_size, str(tmp_path), [name])
    for rank, result in enumerate(results):
        _check(result[name], rank)


def test_an_optimizer_that_has_lost_its_param_groups_is_refused(tmp_path: Path) -> None:
    (error,) = run_ranks(f"{CASES}:refuses_lost_groups", 1, directory=str(tmp_path))
    assert "DeepSpeed keeps only the first of Adagrad's param groups" in error


def _check(record: dict[str, Any], rank: int) -> None:
    assert "master of first.weight" in record["moved"], "the target must differ before the resume"
    assert "torch's generator" in record["moved"]
    assert record["resumed"] == [], f"rank {rank}: as it was saved"
    assert record["at the end"] == [], f"rank {rank}: as if it had never stopped"
    whole, halves = record["losses"]
    assert halves == whole, f"rank {rank}"
