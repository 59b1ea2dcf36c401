"""What of a checkpoint must agree with the live engine, and what need not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.checkpoint.zero3 import Layout
from engine.format.manifest import Manifest, Parameter
from engine.format.shard import Entry
from engine.resume import validate
from engine.resume.errors import MismatchError
from tests.format import build

WHOLE = {
    "buffer/steps_seen": torch.zeros((), dtype=torch.int64),
    "buffer/running_mean": torch.zeros(2),
    "rng/torch": torch.zeros(16, dtype=torch.uint8),
}
KIND = "torch.optim.adamw.AdamW"


def manifest(**fields: Any) -> Manifest:
    of = replace(build.draft(), **fields)
    receipts = [build.receipt(of, rank, build.shard_bytes(of, rank)) for rank in range(3)]
    return Manifest.from_draft(of.draft_json(), receipts)


def check(
    parameters: tuple[Parameter, ...] = build.PARAMETERS,
    world_size: int = 3,
    kind: str = KIND,
    groups: int = 2,
    whole: dict[str, torch.Tensor] = WHOLE,
    **stored: Any,
) -> None:
    layout = Layout(parameters, (), (), 0, world_size)
    validate.check(manifest(**stored), layout, kind, groups, whole)


FIRST, *REST = build.PARAMETERS


def test_what_fits_is_taken() -> None:
    check()


def test_another_world_size_or_another_order_of_parameters_is_taken() -> None:
    check(world_size=5)
    check(tuple(reversed(build.PARAMETERS)))


def test_another_training_precision_is_taken() -> None:
    check(tuple(replace(p, dtype="F16") for p in build.PARAMETERS))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"name": "other"},
            ["other: in the model, not in", "embed.weight: in the checkpoint, not"],
        ),
        ({"shape": (5, 4)}, ["in the checkpoint: shape [5, 3]", "in this run:       shape [5, 4]"]),
        ({"master_dtype": "BF16"}, ["master F32", "master BF16"]),
        ({"group": 1}, ["param group 0", "param group 1"]),
        ({"dtype": "I8"}, ["[5, 3], BF16", "[5, 3], I8"]),
        (
            {"trainable": False, "group": None, "master_dtype": None},
            ["param group 0", "master None, frozen"],
        ),
    ],
)
def test_another_parameter_is_refused_with_both_sides(
    changes: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(MismatchError, match="another model or optimizer") as raised:
        check((replace(FIRST, **changes), *REST))
    for words in said:
        assert words in str(raised.value)


def test_another_optimizer_or_number_of_groups_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"optimizer\n .*AdamW\n .*SGD"):
        check(kind="torch.optim.sgd.SGD")
    with pytest.raises(MismatchError, match=r"param groups\n .*2\n .*3"):
        check(groups=3)


@pytest.mark.parametrize("world_size", [3, 2])
def test_other_buffers_are_refused_at_every_world_size(world_size: int) -> None:
    for whole in (
        {**WHOLE, "buffer/running_mean": torch.zeros(3)},
        {**WHOLE, "buffer/more": torch.zeros(1)},
        {name: tensor for name, tensor in WHOLE.items() if name != "buffer/running_mean"},
    ):
        with pytest.raises(MismatchError, match="buffer/"):
            check(whole=whole, world_size=world_size)


def test_other_generators_are_refused_at_the_same_world_size_only() -> None:
    """At another they seed new ones: those that this process does not have are left out."""
    more = {**WHOLE, "rng/accelerator": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(MismatchError, match="rng/accelerator"):
        check(whole=more)
    check(whole=more, world_size=2)
    entries = (*build.WHOLE_ENTRIES, Entry("rng/accelerator", "U8", (1 << 40,)))
    huge = replace(manifest(), whole_entries=entries)
    wanted = validate.wanted_whole(huge, Layout(build.PARAMETERS, (), (), 0, 2), WHOLE)
    assert wanted == build.WHOLE_ENTRIES, "nothing is allocated because a manifest says so"


def test_a_million_differences_are_a_short_message() -> None:
    many = tuple(Parameter(f"p{i}", (1,), "BF16", "F32", 0, True) for i in range(1_000_000))
    layout = Layout(build.PARAMETERS, (), (), 0, 3)
    with pytest.raises(MismatchError) as raised:
        validate.check(replace(manifest(), parameters=many), layout, KIND, 2, WHOLE)
    assert len(str(raised.value)) < 2000
    assert "more" in str(raised.value)


def test_what_is_rounded_is_said() -> None:
    parameters = tuple(replace(p, dtype="F16") for p in build.PARAMETERS)
    layout = Layout(parameters, (), (), 0, 3)
    assert validate.conversions(manifest(), layout, WHOLE) == ["frozen parameters from BF16 to F16"]
    half = {**WHOLE, "buffer/running_mean": torch.zeros(2, dtype=torch.bfloat16)}
    layout = Layout(build.PARAMETERS, (), (), 0, 3)
    assert validate.conversions(manifest(), layout, half) == ["buffers from F32 to BF16"]
