"""From plain nested mappings to typed, frozen dataclasses; and where two mappings differ.

Knows nothing of any particular setting. Refuses unknown keys (naming the nearest), missing ones,
and values of another type than the field's: nothing is converted but an int where a float is
wanted, because a quiet conversion turns a typo into a setting.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from launcher.errors import ConfigError, nearest

T = TypeVar("T")

NOT_SET = "(not set)"
"""What `differences` says of a side that has no such key."""

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def build(kind: type[T], values: Any, path: str) -> T:
    """Return `kind(**values)`, with every nested field checked against its annotation.

    Args:
        kind: a dataclass; nested dataclasses, tuples, mappings, literals and `X | None` are
            understood, and unions of dataclasses that a field `kind` tells apart.
        values: what the configuration holds at `path`.
        path: dotted name for messages; empty at the top.

    Raises:
        ConfigError: names the dotted path, the value found and what was wanted.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'the configuration'}: {_found(values)}; wanted a section.")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ConfigError(f"unknown setting {_join(path, key)!r}. {nearest(str(key), fields)}")
    arguments = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], _join(path, name))
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_join(path, name)} is not set.")
    return kind(**arguments)


def is_open(kind: type, path: str) -> bool:
    """Tell whether the section at a dotted path of a dataclass takes any key."""
    hint: Any = kind
    for name in path.split("."):
        hints = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
        if typing.get_origin(hint) is Mapping:
            hint = typing.get_args(hint)[1]
        elif name in hints:
            hint = hints[name]
        elif hint is not Any:
            return False
    return hint in (Any, Mapping[str, Any])


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with a message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def at_least(name: str, value: float, least: int) -> None:
    """Raise ConfigError, naming the setting, if its value is too small."""
    if value < least:
        raise ConfigError(f"{name}={value}: wanted {least} or more.")


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, our value, their value) wherever two settings differ."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            yield from differences(
                ours.get(key, NOT_SET), theirs.get(key, NOT_SET), _join(path, key)
            )
    elif ours != theirs:
        yield path, ours, theirs


def first_difference(ours: Any, theirs: Any) -> tuple[str, Any, Any] | None:
    """Return (dotted key, our value, their value) where two settings first differ."""
    return next(differences(ours, theirs), None)


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if value == "???":  # OmegaConf's mark for a value that the user must give
        raise ConfigError(f"{path} is not set: give it on the command line, {path}=...")
    if origin in (typing.Union, types.UnionType):
        kinds = [part for part in parameters if part is not type(None)]
        if len(kinds) > 1:
            return build(_kind_of(kinds, value, path), value, path)
        return None if value is None else _convert_optional(kinds[0], value, path)
    if origin is typing.Literal:
        return _one_of(parameters, value, path)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    if origin is tuple:
        return _convert_tuple(parameters, value, path)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: {_found(value)}; wanted a section.")
        return {key: _convert(parameters[1], item, _join(path, key)) for key, item in value.items()}
    return value if hint is Any else _scalar(hint, value, path)


def _kind_of(kinds: Sequence[type], section: Any, path: str) -> type:
    """Return the dataclass, of several, whose field `kind` has the literal that the section has."""
    by_kind = {typing.get_args(typing.get_type_hints(kind)["kind"])[0]: kind for kind in kinds}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{path}: {_found(section)}; wanted a section.")
    return by_kind[_one_of(tuple(by_kind), section.get("kind"), f"{path}.kind")]


def _one_of(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    if value not in choices:
        raise ConfigError(f"{path}: {_found(value)}; wanted one of {', '.join(choices)}.")
    return value


def _convert_optional(hint: Any, value: Any, path: str) -> Any:
    if isinstance(value, str) and value.lower() in ("none", "nil") and hint is not str:
        raise ConfigError(f"{path}: {value!r} is text; write {path}=null to leave it unset.")
    return _convert(hint, value, path)


def _convert_tuple(parameters: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if parameters[1:] == (...,):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path}: {_found(value)}; wanted a list.")
        parameters = parameters[:1] * len(value)
    if not isinstance(value, (list, tuple)) or len(value) != len(parameters):
        raise ConfigError(f"{path}: {_found(value)}; wanted a list of {len(parameters)} values.")
    return tuple(
        _convert(hint, item, f"{path}[{i}]")
        for i, (hint, item) in enumerate(zip(parameters, value, strict=True))
    )


def _scalar(hint: type, value: Any, path: str) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(
            f"{path}: {_found(value)}; wanted {_WORDS[hint]}.{_hint(hint, value, path)}"
        )
    return value


def _hint(hint: type, value: Any, path: str) -> str:
    if hint is str and value is not None:
        return f""" Quote it for Hydra, too: "{path}='{value}'"."""
    if not isinstance(value, str) or hint not in (int, float):
        return ""
    digits = value.lstrip("0")
    if digits.isdigit() and value != digits:
        return f" A number has no leading zero: write {digits}."
    return " A number has no unit: the field's name says it." if value[:1].isdigit() else ""


def _found(value: Any) -> str:
    if value is None:
        return "found null"
    if isinstance(value, str):
        return f"found the text {value!r}"
    return f"found {value!r}"


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
