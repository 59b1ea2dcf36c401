"""Plans, images and drafts without DeepSpeed: a synthetic rank with very many parameters."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.checkpoint.copier import DirectCopier
from engine.checkpoint.draft import DraftWriter, Lineage, Progress
from engine.checkpoint.image import Image
from engine.checkpoint.plan import StagingPlan, Structure, state_keys_ahead
from engine.checkpoint.snapshot import Snapshot
from engine.checkpoint.staging import StagingArea
from engine.checkpoint.zero3 import Flat, Layout, LiveState, Piece
from engine.format.manifest import Draft, Parameter
from engine.format.names import SaveId
from engine.format.shard import read_header
from engine.protocol.history import Link

MANY = 20_000
PIECE = 4  # of 7 elements over two ranks; the last rank's has one element of padding
PER_SUB_GROUP = 500
WHOLE = {"rng/python": torch.arange(5, dtype=torch.uint8), "buffer/n": torch.tensor(7)}
SAVE_ID = SaveId(0, 1, "global_step3", "0123456789abcdef")
METADATA = {"save_id": str(SAVE_ID)}


def layout_of(parameters: int) -> Layout:
    """The last of two ranks: every piece but the frozen one's has padding."""
    described = [
        Parameter(f"layer.{i}.weight", (7,), "BF16", "F32", 0, True) for i in range(parameters)
    ]
    described.append(Parameter("frozen", (6,), "BF16", None, None, False))
    sub_groups = tuple(
        tuple(Piece(first + i, PIECE * i, PIECE - 1) for i in range(PER_SUB_GROUP))
        for first in range(0, parameters, PER_SUB_GROUP)
    )
    return Layout(tuple(described), sub_groups, (0,) * len(sub_groups), 1, 2)


def live_of(layout: Layout, keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> LiveState:
    flats = [
        Flat(kind, i, torch.randn(PIECE * len(pieces), requires_grad=kind == "master"))
        for i, pieces in enumerate(layout.sub_groups)
        for kind in ("master", *keys)
    ]
    scalars = tuple({"step": torch.tensor(3.0)} if keys else {} for _ in layout.sub_groups)
    return LiveState(tuple(flats), (torch.randn(3).bfloat16(),), scalars, ({"lr": 1e-3},))


@contextmanager
def area_of(layout: Layout) -> Iterator[StagingArea]:
    area = StagingArea(layout, DirectCopier())
    yield area
    area.close()


def fill(area: StagingArea, live: LiveState) -> tuple[StagingPlan, Image]:
    snapshot = Snapshot(live, WHOLE, Structure.of(live, WHOLE))
    plan = area.plan(snapshot.structure)
    area.reserve(plan.shard.size_bytes)
    header = plan.shard.header_bytes(METADATA)
    return plan, area.stage(0, plan, header, snapshot.tensors)


def calls_in(action: Callable[[], Any]) -> int:
    """Count the calls, Python's and C's, that `action` makes: work, whatever the machine's load."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_the_image_holds_every_slice_and_no_padding() -> None:
    layout = layout_of(1000)
    live = live_of(layout)
    with area_of(layout) as area:
        plan, image = fill(area, live)
        size = plan.shard.size_bytes
        header = read_header(memoryview(image.bytes.numpy())[:size], size)
        assert len(header.entries) == 3 * 1000 + 1 + len(WHOLE)
        for flat in live.flats:
            for piece in layout.sub_groups[flat.sub_group]:
                name = f"{flat.kind}/{layout.parameters[piece.index].name}"
                wanted = flat.tensor.detach()[piece.begin : piece.begin + piece.valid]
                assert torch.equal(_stored(image, header, name, torch.float32), wanted)
        frozen = _stored(image, header, "frozen/frozen", torch.bfloat16)
        assert torch.equal(frozen, live.frozen[0])
        for name, tensor in WHOLE.items():
            assert torch.equal(_stored(image, header, name, tensor.dtype), tensor.reshape(-1))


def _stored(image: Image, header: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    entry = header.entries[name]
    return image.bytes[entry.begin : entry.end].view(dtype)


def test_planning_and_staging_take_work_in_proportion_to_the_parameters() -> None:
    first, later = {}, {}
    for parameters in (MANY // 2, MANY):
        layout = layout_of(parameters)
        live = live_of(layout)
        with area_of(layout) as area:
            first[parameters] = calls_in(lambda a=area, state=live: fill(a, state))
            plan = area.plan(Structure.of(live, WHOLE))
            later[parameters] = calls_in(lambda a=area, state=live: fill(a, state))
            assert area.plan(Structure.of(live, WHOLE)) is plan, "planned again"
            assert len(plan.runs) == 3 * parameters + 1 + len(WHOLE)
    assert first[MANY] < 2.1 * first[MANY // 2]
    # Padding keeps the copies apart here. Next to nothing may come to them.
    assert later[MANY] < 3 * MANY * 1.1


def test_a_save_without_padding_takes_as_many_copies_as_there_are_flat_tensors() -> None:
    layout = layout_of(MANY)
    whole_pieces = tuple(
        tuple(Piece(p.index, p.begin, PIECE) for p in pieces) for pieces in layout.sub_groups
    )
    layout = Layout(layout.parameters, whole_pieces, layout.groups, 0, layout.world_size)
    plan = StagingPlan(layout, Structure.of(live_of(layout), WHOLE))
    assert len(plan.runs) == 3 * MANY // PER_SUB_GROUP + 1 + len(WHOLE)


@pytest.mark.parametrize(
    ("kind", "hyperparameters", "keys"),
    [
        ("torch.optim.adamw.AdamW", {}, ("exp_avg", "exp_avg_sq")),
        ("torch.optim.nadam.NAdam", {}, ("exp_avg", "exp_avg_sq")),
        ("torch.optim.sgd.SGD", {"momentum": 0.9}, ("momentum_buffer",)),
        ("torch.optim.sgd.SGD", {"momentum": 0}, ()),
        ("mine.Unknown", {}, ()),
    ],
)
def test_the_state_that_optimizers_will_make(
    kind: str, hyperparameters: dict[str, Any], keys: tuple[str, ...]
) -> None:
    assert state_keys_ahead(kind, hyperparameters) == keys


def test_plan_and_images_made_ahead_serve_the_state_after_the_first_step() -> None:
    layout = layout_of(1000)
    before, after = live_of(layout, ()), live_of(layout)
    with area_of(layout) as area:
        now = Structure.of(before, WHOLE)
        ahead = area.plan(now.with_state(("exp_avg", "exp_avg_sq")))
        area.reserve(ahead.shard.size_bytes)
        image = fill(area, before)[1]
        assert fill(area, after) == (ahead, image)
        assert area.plan(now).shard.size_bytes < ahead.shard.size_bytes / 2


def test_images_are_prefaulted_in_the_background() -> None:
    layout = layout_of(1000)
    with area_of(layout) as area:
        area.reserve(3 << 20)
        area.wait_until_warm()
        _, image = fill(area, live_of(layout))
        assert image.residence()[0] == image.size_bytes == 3 << 20


def test_a_draft_is_read_back_and_its_parameters_are_encoded_once() -> None:
    layout = layout_of(MANY)
    live = live_of(layout)
    plan = StagingPlan(layout, Structure.of(live, WHOLE))
    writer = DraftWriter(layout, "torch.optim.adamw.AdamW", Lineage((Link(0, 0),), None, {"a": 1}))
    progress = Progress(3, 12, {"k": [1]}, {}, {})
    texts: list[bytes] = []

    def write() -> None:
        begun = writer.begin(SAVE_ID, plan, live, {"none": None}, progress)
        texts.append(writer.end(begun, 0.25))

    first, second = calls_in(write), calls_in(write)
    assert first > MANY
    assert second < MANY / 10
    draft = Draft.from_json(json.loads(texts[1]), "draft")
    assert draft.parameters == layout.parameters
    assert draft.whole_entries == plan.structure.whole
    assert (draft.step, draft.sample_offset, draft.stage_seconds) == (3, 12, 0.25)
    assert [key.key for key in draft.optimizer.state_keys] == ["exp_avg", "exp_avg_sq"]
    assert [run.parameters for run in draft.optimizer.scalars] == [(0, MANY)]
