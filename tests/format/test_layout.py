"""The entries of a shard follow from the parameters and the world size alone."""

import math
from collections import Counter

import pytest

from engine.format.dtypes import ITEMSIZE
from engine.format.layout import entries_of, entries_of_manifest, weight_spans
from engine.format.manifest import Parameter, StateKey
from engine.format.shard import Entry, ShardPlan
from tests.format import build


def test_entries_of_one_rank() -> None:
    assert entries_of_manifest(build.draft(), 1) == [
        Entry("buffer/steps_seen", "I64", ()),
        Entry("master/embed.weight", "F32", (5,)),
        Entry("master/norm.weight", "F32", (2,)),
        Entry("master/one.bias", "F32", (0,)),
        Entry("exp_avg/embed.weight", "F32", (5,)),
        Entry("exp_avg/norm.weight", "F32", (2,)),
        Entry("exp_avg/one.bias", "F32", (0,)),
        Entry("exp_avg_sq/embed.weight", "F32", (5,)),
        Entry("exp_avg_sq/norm.weight", "F32", (2,)),
        Entry("exp_avg_sq/one.bias", "F32", (0,)),
        Entry("buffer/running_mean", "F32", (2,)),
        Entry("frozen/base.weight", "BF16", (2,)),
        Entry("rng/torch", "U8", (16,)),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 40])
def test_all_ranks_together_hold_every_element_once(world_size: int) -> None:
    of = build.draft(world_size)
    elements: Counter[str] = Counter()
    for rank in range(world_size):
        entries = entries_of_manifest(of, rank)
        sizes = [ITEMSIZE[entry.dtype] for entry in entries]
        assert sizes == sorted(sizes, reverse=True)
        ShardPlan(entries)
        for entry in entries:
            elements[entry.name] += math.prod(entry.shape)
    for parameter in of.parameters:
        for kind in ("master", "exp_avg", "exp_avg_sq") if parameter.trainable else ("frozen",):
            assert elements[f"{kind}/{parameter.name}"] == math.prod(parameter.shape)
    for entry in of.whole_entries:
        assert elements[entry.name] == world_size * math.prod(entry.shape)


def test_optimizer_state_may_be_there_for_some_parameters_and_in_several_dtypes() -> None:
    parameters = [Parameter(name, (4,), "BF16", "F32", 0, True) for name in "abc"]
    keys = [StateKey("momentum", "BF16", ((0, 1), (2, 3))), StateKey("momentum", "F32", ((1, 2),))]
    assert entries_of(parameters, keys, [], 1, 0)[3:] == [
        Entry("momentum/b", "F32", (4,)),
        Entry("momentum/a", "BF16", (4,)),
        Entry("momentum/c", "BF16", (4,)),
    ]


def test_the_masters_of_one_dtype_lie_together() -> None:
    """Whatever is frozen beside them; the elements of `one.bias` are all on rank 0."""
    plan = ShardPlan(entries_of_manifest(build.draft(), 1))
    first, last = plan.spans["master/embed.weight"], plan.spans["master/norm.weight"]
    assert weight_spans(plan) == ((first[0], last[1]),)
    dtypes = {"a": "F32", "b": "BF16", "c": "F32", "d": None}
    mixed = [
        Parameter(name, (4,), "BF16", dtype, None if dtype is None else 0, dtype is not None)
        for name, dtype in dtypes.items()
    ]
    plan = ShardPlan(entries_of(mixed, [StateKey("exp_avg", "F32", ((0, 3),))], [], 1, 0))
    assert weight_spans(plan) == (
        (plan.spans["master/a"][0], plan.spans["master/c"][1]),
        plan.spans["master/b"],
    )
    none = ShardPlan(entries_of(mixed[3:], [], [], 1, 0))
    assert weight_spans(none) == ()
