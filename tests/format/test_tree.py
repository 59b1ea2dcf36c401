"""The state tree: exact round trips through JSON, and refusals that name the path."""

import collections
import enum
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.format.errors import FormatError, UnsupportedValueError
from engine.format.tree import decode, encode

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.text()
    | st.text(alphabet=st.characters(categories=["Cs"]))
    | st.just("$")
    | st.binary()
)
keys = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.text(alphabet=st.characters(categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
tensors = st.builds(
    lambda dtype, values, zero_d: _tensor(dtype, values[:1] if zero_d else values, zero_d),
    st.sampled_from([d for d in DTYPES if d is not torch.bool]),
    st.lists(st.integers(0, 255), min_size=8, max_size=64),
    st.booleans(),
)
trees = st.recursive(
    scalars
    | tensors
    | st.sampled_from(DTYPES)
    | st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


def _tensor(dtype: torch.dtype, values: list[int], zero_d: bool) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    data = bytes((values * size)[: len(values) // size * size or size])
    flat = torch.frombuffer(bytearray(data), dtype=dtype).clone()
    return flat[0] if zero_d else flat


def assert_same(found: Any, wanted: Any) -> None:
    """Compare types, order of keys, signs of zeros, and bits of tensors."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert len(found) == len(wanted)
        for (found_key, found_item), (key, item) in zip(found.items(), wanted.items(), strict=True):
            assert_same(found_key, key)
            assert_same(found_item, item)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for found_item, item in zip(found, wanted, strict=True):
            assert_same(found_item, item)
    elif isinstance(wanted, float):
        assert math.isnan(found) if math.isnan(wanted) else repr(found) == repr(wanted)
    elif isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.reshape(-1).view(torch.uint8).tolist() == (
            wanted.reshape(-1).contiguous().view(torch.uint8).tolist()
        )
    else:
        assert found == wanted


def round_trip(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "value"), allow_nan=False)))


@settings(max_examples=150, deadline=None)
@given(trees)
def test_any_tree_comes_back_the_same(tree: Any) -> None:
    assert_same(round_trip(tree), tree)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    ones = torch.ones((), dtype=torch.float32).to(dtype)
    for tensor in (ones, ones.reshape(1), torch.empty(0, dtype=dtype)):
        assert_same(round_trip(tensor), tensor)


def test_every_bfloat16_comes_back_bit_for_bit() -> None:
    """All 65536 of them, NaNs with their payload too."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    for part in patterns.split(16384):
        assert_same(round_trip(part), part)


def test_a_strided_view_is_stored_by_value_and_aliases_nothing() -> None:
    live = torch.arange(10, dtype=torch.float32)
    back = round_trip(live[::3])
    stored = encode(live[::3], "value")
    live.zero_()
    assert back.tolist() == [0.0, 3.0, 6.0, 9.0]
    assert decode(stored).tolist() == [0.0, 3.0, 6.0, 9.0]


def test_conjugate_and_negative_views_are_stored_by_value() -> None:
    tensor = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    assert round_trip(tensor).tolist() == [1 - 2j]
    assert round_trip(tensor.imag).tolist() == [-2.0]


def test_plain_trees_are_stored_as_they_are() -> None:
    value = {"lr": 1e-3, "betas": [0.9, 0.95], "name": "adam", "on": True, "none": None}
    assert encode(value, "value") == value


def test_keys_that_json_would_merge_stay_apart() -> None:
    value = {1: "int", "1": "str", None: "none", "None": "str", (1, "a"): "tuple", "$": "dollar"}
    assert_same(round_trip(value), value)


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"sampler": [0, 1, 2, {"fn": len}]}, "state.sampler[3].fn", "builtin_function"),
        ({"a": {1: object()}}, "state.a[1]", "object"),
        ([Color.RED], "state[0]", "Color"),
        ([Text("x")], "state[0]", "Text"),
        ([Point(1, 2)], "state[0]", "Point"),
        ({"s": {1, 2}}, "state.s", "set"),
        ({"d": collections.defaultdict(list)}, "state.d", "collections.defaultdict"),
        ({"x": 1j}, "state.x", "complex"),
        ({"p": torch.nn.Parameter(torch.zeros(1))}, "state.p", "torch.nn.parameter.Parameter"),
        ({"g": torch.zeros(1, requires_grad=True)}, "state.g", "requires_grad=True"),
        ({"m": torch.zeros(2, 2)}, "state.m", "shape (2, 2)"),
        ({"big": torch.zeros(20_000)}, "state.big", "80000 bytes"),
        ({"sparse": torch.zeros(2).to_sparse()}, "state.sparse", "sparse"),
        ({"meta": torch.zeros(2, device="meta")}, "state.meta", "meta"),
        ({"qint": torch.quint8}, "state.qint", "torch.dtype"),
        ({b"key": 1}, "state", "bytes"),
        ({Color.RED: 1}, "state", "Color"),
        ({(1, (2, b"x")): 1}, "state", "bytes"),
    ],
)
def test_what_cannot_be_stored_exactly_is_refused_by_its_path(
    value: Any, path: str, kind: str
) -> None:
    with pytest.raises(UnsupportedValueError) as raised:
        encode(value, "state")
    assert str(raised.value).startswith(f"{path}: ")
    assert kind in str(raised.value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        encode(loop, "state")


@pytest.mark.parametrize(
    "json_value",
    [
        {"$": "set", "items": []},
        {"$": None},
        {"$": ["dict"]},
        {"$": "tuple"},
        {"$": "tuple", "items": [], "more": 1},
        {"$": "tuple", "items": None},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[1, 2], [1, 3]]},
        {"$": "dict", "items": [[[1], 2]]},
        {"$": "float", "value": "1.0"},
        {"$": "str", "hex": "ff"},
        {"$": "int", "hex": "0xzz"},
        {"$": "int", "hex": 7},
        {"$": "bytes", "hex": "0"},
        {"$": "torch.dtype", "name": "load"},
        {"$": "torch.Size", "items": ["a"]},
        {"$": "torch.Tensor", "dtype": "F32", "shape": [2], "hex": "00000000"},
        {"$": "torch.Tensor", "dtype": "F32", "shape": [1], "hex": "000000"},
        {"$": "torch.Tensor", "dtype": "float32", "shape": [1], "hex": "00000000"},
    ],
)
def test_json_that_encode_never_makes_is_refused(json_value: Any) -> None:
    with pytest.raises(FormatError, match="state tree: not a value"):
        decode(json_value)


def test_json_nested_too_deeply_is_refused() -> None:
    value: Any = []
    for _ in range(200):
        value = [value]
    with pytest.raises(FormatError, match="nested deeper"):
        decode(value)
