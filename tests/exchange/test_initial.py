"""Start from exported weights, on two real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.ranks import run_ranks


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the Toy's cases gave, by rank."""
    return run_ranks("tests.exchange.cases:toys", 2, root=str(tmp_path_factory.mktemp("toys")))


def test_masters_come_back_from_fp32(toys: list[dict[str, Any]]) -> None:
    for rank in toys:
        found = rank["masters_come_back"]
        assert found["masters"][0] == found["masters"][1]
        assert found["training copies"][0] == found["training copies"][1]
        assert found["trained"][0] == found["trained"][1]
        assert len(found["identity"]) > 2


def test_training_copies_come_back_from_bf16(toys: list[dict[str, Any]]) -> None:
    for rank in toys:
        for before, after in rank["other_precisions"].values():
            assert before == after


def test_engines_of_other_kinds_take_the_masters(toys: list[dict[str, Any]]) -> None:
    for rank in toys:
        for kind, (before, after) in rank["other_engines"].items():
            assert before == after, kind


def test_what_does_not_fit_is_listed_on_all_ranks(toys: list[dict[str, Any]]) -> None:
    for rank in toys:
        found = rank["refused_directories"]
        assert found["names"].endswith(
            "holds the weights of another model:\n"
            "  missing: first.bias, [37]\n  missing: seen, [3]\n  unexpected: extra, [2]"
        )
        assert "first.weight: [3, 3] in the files, [37, 13] in the model" in found["shape"]
        assert "frozen: I64 in the files, BF16 in the model" in found["dtype"]
        assert "head.weight and tied.weight: one tensor in the model, two" in found["tied"]
        assert "exported-fp32.absent: cannot be listed: No such file" in found["one rank"]
