"""The data's identity: what it covers, and the error when it is not the checkpoint's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.stream import Component, FingerprintMismatch, Stream, StreamError, TokenWindows
from engine.stream.fingerprint import compare, of_dataset
from tests.stream.datasets import Augmented, Numbered, Told


class Samples:
    """A data set without a fingerprint of its own."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def stream(*, seed: int = 1, weight: float = 0.5, tokens: int = 100) -> Stream:
    windows = TokenWindows(np.arange(tokens, dtype=np.uint16), seq_len=8, source="numbers")
    return Stream(
        [Component("docs", windows, weight), Component("rest", Numbered(9), 1 - weight)], seed=seed
    )


def through_json(fingerprint: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(fingerprint))


def test_the_same_stream_built_again_is_accepted() -> None:
    stream().compare(through_json(stream().fingerprint()))


def test_a_change_lists_what_differs_then_and_now_and_the_remedy_on_lines_of_their_own() -> None:
    stored = through_json(stream().fingerprint())
    with pytest.raises(FingerprintMismatch) as raised:
        stream(tokens=101).compare(stored)
    lines = str(raised.value).splitlines()
    at = lines.index("  components.docs.data.tokens")
    assert lines[at + 1 : at + 3] == ["    in the checkpoint: 100", "    now:               101"]
    assert "  components.docs.data.digest" in lines
    assert "data.accept_changed=true" in lines[-1]
    assert not any(line.startswith(("  seed", "  components.rest")) for line in lines)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"seed": 2}, "  seed"),
        ({"weight": 0.25}, "  segments[0].slots.rest"),
        ({"tokens": 200}, "  components.docs.samples"),
    ],
)
def test_seed_weights_and_lengths_are_covered(change: dict[str, Any], path: str) -> None:
    with pytest.raises(FingerprintMismatch) as raised:
        stream(**change).compare(through_json(stream().fingerprint()))
    assert path in str(raised.value).splitlines()


def test_another_version_of_the_order_is_refused() -> None:
    stored = {**through_json(stream().fingerprint()), "order_version": 0}
    with pytest.raises(FingerprintMismatch, match=r"order_version\n.*checkpoint: 0\n.*now: +1"):
        stream().compare(stored)


def test_a_component_that_came_or_went_is_shown_as_absent() -> None:
    with pytest.raises(FingerprintMismatch, match=r"b\.kind\n.*checkpoint: \(absent\)\n.*'k'"):
        compare({"a": {"kind": "k"}}, {"a": {"kind": "k"}, "b": {"kind": "k"}})
    with pytest.raises(FingerprintMismatch, match=r"b\.kind\n.*'k'\n.*now: +\(absent\)"):
        compare({"a": {"kind": "k"}, "b": {"kind": "k"}}, {"a": {"kind": "k"}})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
        (torch.tensor(True), torch.tensor(False)),
        (np.arange(3), np.arange(3) + 1),
        (["ab", "c"], ["a", "bc"]),
        ([["a"], "b"], [["a", "b"]]),
        ({"x": 1}, {"y": 1}),
        (1, True),
        (1, 1.0),
        (b"a", "a"),
        (None, "None"),
    ],
)
def test_samples_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert of_dataset(Samples(one), "c") == of_dataset(Samples(one), "c")
    assert of_dataset(Samples(one), "c") != of_dataset(Samples(other), "c")


def test_a_data_set_without_fingerprint_is_told_by_class_length_and_some_samples() -> None:
    found = of_dataset(Numbered(1000), "c")
    assert found["kind"] == "tests.stream.datasets.Numbered"
    assert found["samples"] == 1000
    ends = (Samples(*range(100)), Samples(*range(99), -1), Samples(-1, *range(1, 100)))
    assert len({of_dataset(dataset, "c")["digest_of_some_samples"] for dataset in ends}) == 3


def test_random_samples_have_one_digest_and_leave_the_generators_alone() -> None:
    first = of_dataset(Augmented(10), "c")
    random.seed(99)
    torch.manual_seed(99)
    before = random.getstate(), torch.get_rng_state()
    assert of_dataset(Augmented(10), "c") == first
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_sample_that_cannot_be_digested_asks_for_a_fingerprint() -> None:
    with pytest.raises(
        StreamError, match=r"'c', sample 0\['image'\] is a builtins\.object.*method fingerprint\(\)"
    ):
        of_dataset(Samples({"image": object()}), "c")


@pytest.mark.parametrize("wrong", [lambda: {"x": object()}, lambda: 3])
def test_a_fingerprint_that_is_no_json_mapping_is_refused(wrong: Callable[[], Any]) -> None:
    dataset = Numbered(3)
    dataset.fingerprint = wrong  # type: ignore[attr-defined]
    with pytest.raises(StreamError, match=r"'c': fingerprint\(\) of .*Numbered must return"):
        of_dataset(dataset, "c")


def test_a_data_set_that_cannot_be_read_or_fingerprinted_is_named() -> None:
    def fail(*_: object) -> int:
        raise OSError("no such host")

    with pytest.raises(StreamError, match=r"'c', sample 0: the data set raised OSError: no such"):
        of_dataset(Told(3, fail), "c")
    dataset = Numbered(3)
    dataset.fingerprint = fail  # type: ignore[attr-defined]
    with pytest.raises(StreamError, match=r"'c': fingerprint\(\) of .*Numbered raised OSError: no"):
        of_dataset(dataset, "c")
