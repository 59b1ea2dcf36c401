"""The digest of frozen parameters: as specified, at any world size, and moved by any change."""

import struct

import pytest
import torch

from engine.checkpoint.base import element_sum
from engine.format.partition import slice_of

_FORMATS = {
    torch.int8: "B",
    torch.float8_e4m3fn: "B",
    torch.bfloat16: "H",
    torch.float16: "H",
    torch.float32: "I",
    torch.float64: "Q",
}


def _specified(tensor: torch.Tensor) -> int:
    """The specification's formula, one element at a time."""
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    total = 0
    for i, (bits,) in enumerate(struct.iter_unpack("<" + _FORMATS[tensor.dtype], data)):
        z = (bits + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        total += z ^ z >> 31
    return total % 2**64


@pytest.mark.parametrize("dtype", _FORMATS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_add_up_to_the_specified_digest(dtype: torch.dtype, world_size: int) -> None:
    weights = (torch.randn(1001, generator=torch.Generator().manual_seed(3)) * 50).to(dtype)
    total = 0
    for rank in range(world_size):
        begin, end = slice_of(len(weights), world_size, rank)
        total += element_sum(weights[begin:end], begin)
    assert total % 2**64 == _specified(weights)


def test_windows_join(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(1000).bfloat16()
    whole = element_sum(weights, 5)
    monkeypatch.setattr("engine.checkpoint.base._WINDOW", 7)
    assert element_sum(weights, 5) == whole


def test_any_flipped_bit_and_any_swap_changes_it() -> None:
    weights = torch.arange(1.0, 41.0).bfloat16()
    digest = element_sum(weights, 0)
    bits = weights.view(torch.int16)
    for i in range(len(bits)):
        for bit in range(16):
            changed = bits.clone()
            changed[i] ^= 1 << bit if bit < 15 else -(1 << 15)
            assert element_sum(changed.view(torch.bfloat16), 0) != digest
        swapped = weights.clone()
        swapped[[i, i - 1]] = weights[[i - 1, i]]
        assert element_sum(swapped, 0) != digest
    assert element_sum(weights, 1) != digest
