"""What monitors show, read back: TensorBoard's own reader, and the rows of CSV files."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FIGURES = ("loss", "lr", "grad_norm", "step_seconds")

MONITORS = "monitor=[tensorboard,csv]"
"""The override that `assert_one_curve` is about."""

Curve = list[tuple[int, float]]


def as_float32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def tensorboard_curves(directory: Path) -> dict[str, Curve]:
    """Every figure's points in the order in which TensorBoard shows them."""
    shown = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {
        name: [(event.step, event.value) for event in shown.Scalars(name)]
        for name in shown.Tags()["scalars"]
    }


def csv_curves(directory: Path) -> dict[str, Curve]:
    """Every figure's rows, in their order."""
    curves = {}
    for path in directory.glob("*.csv"):
        text = path.read_text()
        if not text:  # its writer was killed before it had a row
            continue
        heading, *rows = csv.reader(text.splitlines())
        assert heading[0] == "step"
        assert path.stem == f"train_{heading[1]}"
        curves[f"train/{heading[1]}"] = [(int(step), float(value)) for step, value in rows]
    return curves


def curves_of(kept: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """What is to be shown of kept lines of metrics.jsonl, in full precision."""
    lines = list(kept)
    return {
        f"train/{name}": [(line["step"], line[name]) for line in lines] for name in FIGURES if lines
    }


def assert_one_curve(run: Path) -> None:
    """See that both kinds of files show the last word on each step of a run once, in order."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last_word = {line["step"]: line for line in map(json.loads, lines)}
    assert list(last_word) == list(range(1, len(last_word) + 1))
    expected = curves_of(last_word.values())
    in_csv = csv_curves(run / "csv")
    tokens = in_csv.pop("train/tokens_per_second")
    assert [step for step, _ in tokens] == list(last_word)
    assert in_csv == expected
    in_tensorboard = tensorboard_curves(run / "tensorboard")
    assert len(in_tensorboard.pop("train/tokens_per_second")) == len(last_word)
    assert in_tensorboard == {
        name: [(step, as_float32(value)) for step, value in curve]
        for name, curve in expected.items()
    }
