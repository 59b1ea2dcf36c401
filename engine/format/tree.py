"""The state tree: whatever is not a tensor entry, as JSON that decodes to the very same value.

Types are on an explicit list, and compared exactly: a subclass could carry more than its base, so
it is refused like any other unknown type. Values that JSON has no form for are objects with the key
``$`` for their type (`docs/checkpoint-format.md`, "Tree"). What is not kept: identity (a value that
stands twice is stored twice), the device of a tensor (it comes back on the CPU), and the payload of
a NaN.
"""

import math
import sys
from collections import OrderedDict
from typing import Any

from engine.format.dtypes import OF_TORCH_NAME, TORCH_NAME
from engine.format.errors import FormatError, UnsupportedValueError
from engine.format.sealed import JSON

__all__ = ["decode", "encode"]

_MAX_DEPTH = 64
_MAX_TENSOR_BYTES = 65_536
_KEY = "$"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_INT64 = 1 << 63


def encode(value: object, where: str) -> JSON:
    """Return `value` as JSON; `decode` of that is equal to it, types and order of keys included.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, torch.Size,
            torch.dtype, or a dense torch tensor of at most one dimension and 64 KiB. Not kept.
        where: what the value is, as messages name it: ``client_state``.

    Raises:
        UnsupportedValueError: something else is in it; the message names the path to it.
    """
    return _encode(value, where, 0)


def decode(json: JSON) -> Any:
    """Return the value that `encode` made `json` from. Imports torch if a torch type is in it.

    Raises:
        FormatError: `json` is nothing that `encode` makes.
    """
    return _decode(json, 0)


def _encode(value: Any, where: str, depth: int) -> JSON:
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return _encode_scalar(value)
    if depth == _MAX_DEPTH:
        raise UnsupportedValueError(
            f"{where[:200]}...: nested deeper than {_MAX_DEPTH} levels, or contains itself"
        )
    if kind in (dict, OrderedDict):
        return _encode_dict(value, where, depth)
    name = _qualified_name(kind)
    if kind in (list, tuple) or name == "torch.Size":
        items = [_encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {_KEY: name, "items": items}
    if name == "torch.Tensor":
        return _encode_tensor(value, where)
    if name == "torch.dtype" and (spelled := str(value).removeprefix("torch.")) in OF_TORCH_NAME:
        return {_KEY: name, "name": spelled}
    raise UnsupportedValueError(
        f"{where}: {name} cannot be stored exactly; store None, bool, int, float, str, bytes, "
        "list, tuple, dict, torch.Size, torch.dtype or a small tensor instead"
    )


def _encode_scalar(value: Any) -> JSON:
    if type(value) is int and not -_INT64 <= value < _INT64:
        return {_KEY: "int", "hex": hex(value)}
    if type(value) is str and not _is_unicode(value):
        return {_KEY: "str", "hex": value.encode("utf-8", "surrogatepass").hex()}
    if type(value) is float and not math.isfinite(value):
        return {_KEY: "float", "value": str(value)}
    return {_KEY: "bytes", "hex": value.hex()} if type(value) is bytes else value


def _is_unicode(text: str) -> bool:
    """Tell whether `text` has no surrogates: JSON would join a pair of them to one character."""
    if text.isascii():
        return True
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _encode_dict(value: dict[Any, Any], where: str, depth: int) -> JSON:
    plain = type(value) is dict and all(type(key) is str and _is_unicode(key) for key in value)
    if plain and _KEY not in value:
        return {key: _encode(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    items = [
        [_encode_key(key, where, depth), _encode(item, f"{where}[{key!r:.80}]", depth + 1)]
        for key, item in value.items()
    ]
    return {_KEY: "dict" if type(value) is dict else "OrderedDict", "items": items}


def _encode_key(key: Any, where: str, depth: int) -> JSON:
    if key is None or type(key) in (str, int, float, bool, tuple):
        if type(key) is tuple:
            for part in key:
                _encode_key(part, where, depth)
        return _encode(key, f"{where}, the key {key!r:.80}", depth + 1)
    raise UnsupportedValueError(
        f"{where}: the key {key!r:.80} is of type {_qualified_name(type(key))}; use None, bool, "
        "int, float, str, or a tuple of these as keys"
    )


def _encode_tensor(tensor: Any, where: str) -> JSON:
    torch = sys.modules["torch"]  # a tensor exists, so torch is imported
    dtype = OF_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))
    size_bytes = tensor.numel() * tensor.element_size()
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.requires_grad or not dtype:
        raise UnsupportedValueError(
            f"{where}: a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}, "
            f"requires_grad={tensor.requires_grad}; store tensor.detach() with strided data"
        )
    if tensor.dim() > 1 or size_bytes > _MAX_TENSOR_BYTES:
        raise UnsupportedValueError(
            f"{where}: a tensor of shape {tuple(tensor.shape)}, {size_bytes} bytes; at most one "
            f"dimension and {_MAX_TENSOR_BYTES} bytes fit; register it as a buffer of the module "
            "to store it in the shards"
        )
    # a fresh tensor: a view of one element counts as contiguous whatever its stride, and may be
    # lazily conjugated or negated, and view(uint8) refuses either
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    data = bytes(flat.view(torch.uint8).tolist())
    return {_KEY: "torch.Tensor", "dtype": dtype, "shape": list(tensor.shape), "hex": data.hex()}


def _decode(json: JSON, depth: int) -> Any:
    if json is None or isinstance(json, (bool, int, float, str)):
        return json
    if depth > _MAX_DEPTH:
        raise FormatError(f"state tree: nested deeper than {_MAX_DEPTH} levels")
    if isinstance(json, list):
        return [_decode(item, depth + 1) for item in json]
    if not isinstance(json, dict):
        raise FormatError(f"state tree: {_qualified_name(type(json))} is not JSON")
    if _KEY not in json:
        return {key: _decode(item, depth + 1) for key, item in json.items()}
    try:
        return _decode_tagged(json[_KEY], {k: v for k, v in json.items() if k != _KEY}, depth)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            f"state tree: not a value this version of Everstep writes: {json!r:.200}"
        ) from error


def _decode_tagged(kind: str, fields: dict[str, JSON], depth: int) -> Any:
    if kind in ("dict", "OrderedDict", "tuple", "torch.Size"):
        (items,) = _exactly(fields, "items")
        return _decode_items(kind, [_decode(item, depth + 1) for item in items])
    if kind in ("int", "str", "bytes"):
        (text,) = _exactly(fields, "hex")
        return _decode_hex(kind, text)
    if kind == "float":
        (text,) = _exactly(fields, "value")
        return _NON_FINITE[text]
    if kind == "torch.dtype":
        (name,) = _exactly(fields, "name")
        return _torch_dtype(OF_TORCH_NAME[name])
    if kind == "torch.Tensor":
        return _decode_tensor(*_exactly(fields, "dtype", "shape", "hex"))
    raise ValueError(kind)


def _decode_hex(kind: str, text: str) -> int | str | bytes:
    if kind == "int":
        return int(text, 16)
    data = bytes.fromhex(text)
    return data.decode("utf-8", "surrogatepass") if kind == "str" else data


def _decode_items(kind: str, items: list[Any]) -> Any:
    if kind == "tuple":
        return tuple(items)
    if kind == "torch.Size":
        import torch

        return torch.Size(items)
    decoded: dict[Any, Any] = OrderedDict() if kind == "OrderedDict" else {}
    for key, item in items:
        if key in decoded:
            raise ValueError(f"the key {key!r} is there twice")
        decoded[key] = item
    return decoded


def _decode_tensor(dtype: str, shape: list[int], text: str) -> Any:
    import torch

    data = bytearray.fromhex(text)
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(_torch_dtype(dtype)).reshape(shape).clone()


def _torch_dtype(dtype: str) -> Any:
    import torch

    return getattr(torch, TORCH_NAME[dtype])


def _exactly(fields: dict[str, JSON], *names: str) -> list[JSON]:
    if fields.keys() != set(names):
        raise ValueError(f"fields {sorted(fields)}, wanted {sorted(names)}")
    return [fields[name] for name in names]


def _qualified_name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )
