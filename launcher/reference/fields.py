"""A field of a settings class in words: its meaning, its type, and a value of it.

The meaning is the text under the field, which Python does not keep: it is read from the source.
"""

import ast
import dataclasses
import inspect
import itertools
import types
import typing
from collections.abc import Mapping
from typing import Any

from launcher.errors import one_of

_NAMES = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`"}


def meanings_of(kind: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, on one line; empty where there is none."""
    found = {field.name: "" for field in dataclasses.fields(kind)}
    for owner in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        (definition,) = ast.parse(inspect.getsource(owner)).body
        statements = typing.cast(ast.ClassDef, definition).body
        for field, text in itertools.pairwise(statements):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[name] = " ".join(words.split())
    return found


def type_in_words(hint: Any) -> str:
    """Return a type that `launcher.schema` understands as a person would say it, in Markdown."""
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (part for part in parameters if part is not type(None))
        return f"{type_in_words(inner)} or `null`"
    if origin is typing.Literal:
        return one_of([f"`{word}`" for word in parameters])
    if origin is tuple:
        count = "" if parameters[1:] == (...,) else f"{len(parameters)} "
        return f"list of {count}{_plural(parameters[0])}"
    if dataclasses.is_dataclass(hint) or hint == Mapping[str, Any]:
        return "section"
    if origin is not None and issubclass(origin, Mapping):
        return f"{_plural(parameters[1])} by name"
    return _NAMES[hint]


def value_in_words(value: Any) -> str:
    """Return a value as it is written on a command line; nothing for one that must be given."""
    if value == "???":  # OmegaConf's mark for it
        return ""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        items = (f"{key}: {value_in_words(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(value_in_words, value)) + "]"
    return str(value)


def _plural(hint: Any) -> str:
    first, of, rest = type_in_words(hint).partition(" of ")
    return f"{first}s{of}{rest}"
