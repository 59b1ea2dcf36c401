"""`python -m engine diff`: which weights moved between two checkpoints, by hand and by torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from engine.__main__ import main
from engine.exchange import compare
from engine.exchange.checkpoint import StoredWeights
from engine.exchange.compare import Compare, Comparison
from engine.exchange.convert import values_of
from engine.exchange.movement import Moved
from engine.format import dtypes
from engine.format.manifest import Base
from launcher import tools
from tests.exchange import stored
from tests.format import build
from tests.scripts import run_script

TAGS = ("global_step400", "global_step500")
SAVES = tuple(f"a0007.s001{n}.{tag}.5ca1ab1e" for n, tag in enumerate(TAGS))

# By hand: a norm of 5 that moves by 0.5, one of 1 by 2, from nothing to 5, and two that stay.
BEFORE = {
    "wide": torch.tensor([3.0, 4.0]),
    "far": torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    "new": torch.zeros(3),
    "still": torch.tensor([7.0]),
}
AFTER = {
    "wide": torch.tensor([3.0, 4.5]),
    "far": torch.tensor([[1.0, 0.0, 0.0], [0.0, -2.0, 0.0]]),
    "new": torch.tensor([0.0, 3.0, 4.0]),
    "still": torch.tensor([7.0]),
}
FROZEN = {"base": torch.tensor([1.0, 2.0, 2.0]), "other": torch.ones(4, dtype=torch.bfloat16)}
THAWED = {**FROZEN, "base": torch.tensor([1.0, 2.0, 2.25])}


def pair(
    root: Path,
    before: Mapping[str, torch.Tensor] = BEFORE,
    after: Mapping[str, torch.Tensor] = AFTER,
    *,
    ranks: tuple[int, int] = (3, 3),
    frozen: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] = (FROZEN, THAWED),
    base: Base | None = None,
) -> Path:
    """Commit two checkpoints, of steps 400 and 500, and return the directory that has them."""
    for weights, count, fixed, save in zip((before, after), ranks, frozen, SAVES, strict=True):
        stored.checkpoint(
            root, world_size=count, masters=weights, frozen=fixed, save_id=save, base=base
        )
    return root


def run(root: Path, *, full: bool = True, most_open: int = 2 * (1 + 16)) -> Comparison:
    done: list[int] = []
    open_before = len(os.listdir("/proc/self/fd"))

    def progress(count: int) -> None:
        done.append(count)
        assert len(os.listdir("/proc/self/fd")) <= open_before + most_open

    with (
        StoredWeights(str(root / TAGS[0]), whole=False) as before,
        StoredWeights(str(root / TAGS[1]), whole=False) as after,
    ):
        work = Compare(before, after, full=full)
        found = work.run(progress)
    assert sum(done) == work.work_bytes
    assert len(os.listdir("/proc/self/fd")) == open_before
    return found


def by_name(found: Comparison) -> dict[str, Moved]:
    return {weight.name: weight for weight in found.weights}


@pytest.mark.parametrize("ranks", [(1, 1), (3, 3), (1, 4), (7, 2)])
def test_what_moved_is_told_by_norm_at_any_world_sizes(
    tmp_path: Path, ranks: tuple[int, int]
) -> None:
    found = run(pair(tmp_path, ranks=ranks))
    assert [weight.name for weight in found.weights] == [
        "new",
        "far",
        "wide",
        "base",
        "other",
        "still",
    ]
    weights = by_name(found)
    figures = {
        name: (one.norm, one.norm_of_change, one.relative, one.largest, one.changed, one.numel)
        for name, one in weights.items()
    }
    assert figures == {
        "new": (0.0, 5.0, math.inf, 4.0, 2, 3),
        "far": (1.0, 2.0, 2.0, 2.0, 1, 6),
        "wide": (5.0, 0.5, 0.1, 0.5, 1, 2),
        "base": (3.0, 0.25, 0.25 / 3, 0.25, 1, 3),
        "other": (2.0, 0.0, 0.0, 0.0, 0, 4),
        "still": (7.0, 0.0, 0.0, 0.0, 0, 1),
    }
    assert {name: one.flags for name, one in weights.items() if one.flags} == {
        "base": ["frozen, and moved"],
        "still": ["trainable, and did not move"],
    }
    assert not found.stands_still


def test_windows_and_pieces_are_put_together_as_torch_has_it(tmp_path: Path) -> None:
    """More shards than are held open, and windows that cut across the slices of both."""
    generator = torch.Generator().manual_seed(1)
    before = {f"w{n}": torch.randn(n * 31, 5, generator=generator) for n in range(1, 4)}
    after = {name: value + torch.randn(value.shape) / 100 for name, value in before.items()}
    root = pair(tmp_path, before, after, ranks=(5, 19), frozen=({}, {}))
    with (
        mock.patch.object(compare, "WINDOW_ELEMENTS", 7),
        mock.patch.object(compare, "_OPEN_SHARDS", 2),
    ):
        found = run(root, full=False, most_open=2 * (1 + 2))  # directory and shards of each
    for name, moved in by_name(found).items():
        was, change = before[name].double(), after[name].double() - before[name].double()
        assert moved.norm == pytest.approx(was.norm().item(), rel=1e-12)
        assert moved.norm_of_change == pytest.approx(change.norm().item(), rel=1e-12)
        assert moved.largest == change.abs().max().item()
        assert moved.changed == int((before[name] != after[name]).sum())
        assert moved.numel == was.numel()


def test_values_that_are_not_finite_are_counted_and_left_out(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    before = {"w": torch.tensor([3.0, 4.0, nan, inf, 1.0, 0.0])}
    after = {"w": torch.tensor([3.0, 4.5, nan, 2.0, nan, -inf])}
    (moved,) = run(pair(tmp_path, before, after, frozen=({}, {}))).weights
    assert (moved.nan, moved.inf) == ((1, 2), (1, 1))
    assert moved.flags == ["NaN: 1 before, 2 after", "Inf: 1 before, 1 after"]
    assert moved.norm == pytest.approx(math.sqrt(26), rel=1e-12)
    assert (moved.norm_of_change, moved.largest, moved.changed) == (0.5, 0.5, 4)


def test_totals_are_by_param_group(tmp_path: Path) -> None:
    for save, factor in zip(SAVES, (1, 2), strict=True):
        values = {
            "master/embed.weight": np.full(15, factor, "<f4").tobytes(),
            "master/norm.weight": np.full(4, 2, "<f4").tobytes(),
            "master/one.bias": np.full(1, 3 * factor, "<f4").tobytes(),
            "frozen/base.weight": np.zeros(4, "<u2").tobytes(),
            "buffer/steps_seen": np.array(400 * factor, "<i8").tobytes(),
            "buffer/running_mean": np.zeros(2, "<f4").tobytes(),
        }
        build.checkpoint(tmp_path, build.draft(1, save), [values])
    found = run(tmp_path)
    assert [
        (group.name, group.norm, group.norm_of_change, group.changed, group.numel)
        for group in found.groups
    ] == [
        ("param group 0", pytest.approx(math.sqrt(15)), pytest.approx(math.sqrt(15)), 15, 15),
        ("param group 1", 5.0, 3.0, 1, 5),
        ("frozen", 0.0, 0.0, 0, 4),
        ("buffer", 400.0, 400.0, 1, 3),
    ]


def test_weights_that_stand_still_while_the_step_moves_are_an_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = pair(tmp_path, BEFORE, BEFORE, ranks=(2, 3))
    assert main(["diff", str(root), *TAGS]) == 1
    assert capsys.readouterr().err == (
        "engine: global_step400 and global_step500 hold the same trainable weights, bit for bit, "
        "although the step moved from 400 to 500: nothing was learnt between them. Look at lr, "
        "grad_norm and skipped steps in metrics.jsonl\n"
    )
    # A checkpoint and itself are the same, and rightly so.
    assert main(["diff", str(root), TAGS[0], TAGS[0]]) == 0
    # One bit is movement.
    other = dict(BEFORE)
    other["wide"] = torch.nextafter(BEFORE["wide"], torch.tensor([3.0, 9.0]))
    assert main(["diff", str(pair(tmp_path / "bit", BEFORE, other)), *TAGS]) == 0


def test_a_person_reads_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.is_tool(["diff"])
    assert tools.run(["diff", str(pair(tmp_path)), *TAGS, "--top", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "global_step400 -> global_step500: 100 steps, 6 weights",
        "",
        "RELATIVE  CHANGE  NORM  LARGEST  CHANGED  SHAPE  NAME",
        "  from 0       5     0        4    66.7%  3      new",
        "       2       2     1        2    16.7%  2x3    far",
        "     0.1     0.5     5      0.5    50.0%  2      wide",
        "... and 3 more, which moved less",
        "",
        "RELATIVE  CHANGE   NORM  LARGEST  CHANGED  SHAPE  NAME",
        "   0.624   5.408   8.66        4    33.3%  12     param group 0",
        "  0.0693    0.25  3.606     0.25    14.3%  7      frozen",
        "",
        "flag: base: frozen, and moved",
        "flag: still: trainable, and did not move",
    ]


def test_programs_get_all_of_it_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(pair(tmp_path)), *TAGS, "--json", "--top", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["before"] == {"tag": TAGS[0], "step": 400}
    assert (found["alarm"], len(found["weights"])) == (None, 6)
    assert found["weights"][0] == {
        "name": "new",
        "shape": [3],
        "group": 0,
        "numel": 3,
        "changed": 2,
        "norm": 0.0,
        "norm_of_change": 5.0,
        "relative": None,
        "largest": 4.0,
        "nan": [0, 0],
        "inf": [0, 0],
        "flags": [],
    }


def test_what_only_one_has_is_said(tmp_path: Path) -> None:
    after = {**AFTER, "far": torch.ones(6), "more": torch.ones(1)}
    del after["still"]
    frozen = (FROZEN, {**FROZEN, "other": torch.ones(4, dtype=torch.complex64)})
    found = run(pair(tmp_path, BEFORE, after, frozen=frozen))
    assert found.unmatched == [
        "far: [2, 3] in global_step400, [6] in global_step500",
        "still: only in global_step400",
        "other: complex numbers in one of the two only",
        "more: only in global_step500",
    ]
    assert set(by_name(found)) == {"wide", "new", "base"}


def test_a_weight_that_was_thawed_in_between_is_not_flagged(tmp_path: Path) -> None:
    """Frozen at first, in its training dtype; trained later, with a master."""
    after = {**AFTER, "other": torch.full((4,), 2.0)}
    root = pair(tmp_path, BEFORE, after, frozen=(FROZEN, {"base": FROZEN["base"]}))
    moved = by_name(run(root))["other"]
    assert (moved.flags, moved.relative, moved.changed, moved.group) == ([], 1.0, 4, 0)


def test_checkpoints_without_their_frozen_weights_can_be_compared(tmp_path: Path) -> None:
    base = Base("model", ("0" * 16,) * 2)
    root = pair(tmp_path, base=base)
    assert set(by_name(run(root))) == set(BEFORE)


@pytest.mark.parametrize("which", TAGS)
def test_a_damaged_shard_is_named_unless_only_sizes_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    root = pair(tmp_path)
    build.flip(root / which / "rank_00001_of_00003.safetensors", -1)
    assert main(["diff", str(root), *TAGS]) == 1
    assert f"{which}/rank_00001_of_00003.safetensors: data" in capsys.readouterr().err
    assert main(["diff", str(root), *TAGS, "--verify", "size"]) == 0


def test_wrong_arguments_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = pair(tmp_path)
    assert main(["diff", str(root), TAGS[0], "global_step7"]) == 2
    assert "global_step7: not in" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["diff", str(root), *TAGS, "--top", "0"])
    assert stopped.value.code == 2
    assert "wanted a number from 1" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", sorted(dtypes.ITEMSIZE))
def test_every_stored_dtype_is_read_as_torch_reads_it(dtype: str) -> None:
    kind = getattr(torch, dtypes.TORCH_NAME[dtype])
    raw = torch.arange(256, dtype=torch.uint8).repeat(8)
    if dtype == "BOOL":
        raw = raw % 2
    data = memoryview(raw.numpy().tobytes())
    wanted = raw.view(kind)
    if dtype == "C64":
        wanted = torch.view_as_real(wanted)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = values_of(data, dtype).astype(np.float64)
    expected = wanted.numpy() if not wanted.is_floating_point() else wanted.double().numpy()
    np.testing.assert_array_equal(values, expected.reshape(-1).astype(np.float64))


def test_it_runs_without_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom engine.__main__ import main\ncode = main(['diff', *sys.argv[1:]])\n"
        "heavy = {'torch', 'deepspeed', 'hydra'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if heavy or code else 0)\n"
    )
    done = run_script(script, pair(tmp_path), *TAGS)
    assert done.returncode == 0, done.stderr
