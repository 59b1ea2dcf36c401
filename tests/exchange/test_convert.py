"""Conversion of floating dtypes against torch's own casts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.exchange.convert import converter
from engine.exchange.errors import ExchangeError
from engine.format.dtypes import TORCH_NAME

TARGETS = ("F32", "BF16", "F16")


def _convert(values: torch.Tensor, source: str, target: str) -> torch.Tensor:
    data = memoryview(values.view(torch.uint8).numpy()).cast("B")
    converted = converter("w", source, target)(data)
    flat = torch.frombuffer(bytearray(converted), dtype=torch.uint8)
    return flat.view(getattr(torch, TORCH_NAME[target]))


def _patterns() -> torch.Tensor:
    """Every upper half of a float32, with lower halves around the tie."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x1001], dtype=np.uint32)
    return torch.from_numpy((upper[:, None] | lower).reshape(-1).view(np.float32).copy())


@pytest.mark.parametrize("target", TARGETS)
def test_float32_is_rounded_as_torch_rounds(target: str) -> None:
    values = _patterns()
    wanted = values.to(getattr(torch, TORCH_NAME[target]))
    fits = ~(wanted.isinf() & values.isfinite())
    found = _convert(values[fits], "F32", target)
    is_nan = wanted[fits].isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert is_nan.any()
    assert torch.equal(found[~is_nan].view(torch.uint8), wanted[fits][~is_nan].view(torch.uint8))


@pytest.mark.parametrize("source", ["BF16", "F16"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_16_bit_value(source: str, target: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    values = torch.from_numpy(bits.copy()).view(getattr(torch, TORCH_NAME[source]))
    values = values[~values.isnan()]
    wanted = values.to(getattr(torch, TORCH_NAME[target]))
    fits = ~(wanted.isinf() & values.isfinite())
    found = _convert(values[fits], source, target)
    assert torch.equal(found.view(torch.uint8), wanted[fits].view(torch.uint8))


def test_float64() -> None:
    values = torch.tensor([0.1, -1e-300, 65504.0, 2.0**-24], dtype=torch.float64)
    for target in TARGETS:
        wanted = values.float().to(getattr(torch, TORCH_NAME[target]))
        assert torch.equal(_convert(values, "F64", target), wanted)


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [(65520.0, "F32", "F16"), (3.4e38, "F32", "BF16"), (1e39, "F64", "F32")],
)
def test_what_does_not_fit_is_refused(value: float, source: str, target: str) -> None:
    values = torch.tensor([1.0, value], dtype=getattr(torch, TORCH_NAME[source]))
    with pytest.raises(ExchangeError, match=rf"w: the value .* beyond what {target} holds"):
        _convert(values, source, target)


def test_infinity_stays() -> None:
    values = torch.tensor([float("inf"), float("-inf")])
    assert torch.equal(_convert(values, "F32", "F16"), values.half())


def test_integers_are_not_converted() -> None:
    with pytest.raises(ExchangeError, match="from I64 to BF16"):
        converter("w", "I64", "BF16")
