"""Cases from public reports, by their number in our list of them, as far as weights go out."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.__main__ import main
from tests.exchange import stored
from tests.exchange.child import measured

MEBIBYTE = 1 << 20


def test_8_the_given_tag_and_not_latest(tmp_path: Path) -> None:
    """DeepSpeed#8499: a weights-only load of a given tag loads `latest`."""
    for step in (3, 9):
        stored.checkpoint(
            tmp_path,
            world_size=2,
            masters={"w": torch.full((5,), float(step))},
            save_id=f"a0001.s{step:04d}.global_step{step}.5ca1ab1e",
        )
    (tmp_path / "latest").write_text("global_step9\n")
    assert main(["export", str(tmp_path), "--tag", "global_step3", "--out", f"{tmp_path}/3"]) == 0
    assert main(["export", str(tmp_path), "--out", f"{tmp_path}/newest"]) == 0
    assert stored.exported(tmp_path / "3")["w"].tolist() == [3.0] * 5
    assert stored.exported(tmp_path / "newest")["w"].tolist() == [9.0] * 5


def test_9_tied_and_frozen_weights_and_buffers_come_out(tmp_path: Path) -> None:
    """DeepSpeed#1896, #3824, #3090: at any world size, also with more ranks than elements."""
    frozen = {"base": torch.arange(6.0).reshape(2, 3).bfloat16()}
    buffers = {"seen": torch.tensor([4, 5])}
    masters = {"head.weight": torch.arange(3.0)}
    for world_size in (1, 2, 7):
        root = tmp_path / str(world_size)
        stored.checkpoint(
            root,
            world_size=world_size,
            masters=masters,
            frozen=frozen,
            buffers=buffers,
            aliases={"head.weight": ("tied.weight",)},
        )
        assert main(["export", str(root), "--dtype", "fp32", "--out", f"{root}/out"]) == 0
        wanted = {**masters, "base": frozen["base"].float(), **buffers}
        stored.assert_equal(stored.exported(root / "out"), wanted)


def test_12_export_needs_no_more_memory_than_windows(tmp_path: Path) -> None:
    """DeepSpeed PR 4025: merging to fp32 takes more memory than the machine has.

    Weights of 96 MiB in fp32, with as much again of moments, go out through a process whose peak is
    a fifth of that above what it takes to start. One output shard has 48 MiB, a rank's slice 24.
    """
    masters = {f"layer{i}.weight": torch.full((12, 1 << 20), float(i)) for i in range(2)}
    stored.checkpoint(tmp_path / "run", world_size=2, masters=masters)
    out = tmp_path / "out"
    options = ("--dtype", "fp32", "--shard-size", "48MiB")
    found = measured("export", str(tmp_path / "run"), "--out", str(out), *options)
    assert len(list(out.glob("model-*.safetensors"))) == 2
    assert found.extra_peak_bytes < 20 * MEBIBYTE
