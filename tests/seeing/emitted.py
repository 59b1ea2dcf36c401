"""Which events the code emits, and with which fields, read from its source.

An event is made in one of three ways: `emit("name", field=...)` and `tell("name", field=...)`, by
a dict with the key `event`, and by `_emit(name, {...})` or `_failed(name, {...})`. A name that is
no literal is one that the function assigns to that variable, or the key of a dict that it loops
over; a function that only passes names on has none.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_CALLS = ("emit", "tell", "_tell", "_emit", "_failed")


def emitted(root: Path) -> dict[str, set[str]]:
    """Return the fields that are named where an event is emitted, by event."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for package in ("engine", "launcher"):
        for path in sorted((root / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef):
                    for name, fields in _events_of(function):
                        found[name] |= fields
    return dict(found)


def _events_of(function: ast.FunctionDef) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _name_of(node.func) in _CALLS and node.args:
            fields = {keyword.arg for keyword in node.keywords if keyword.arg}
            for argument in node.args[1:]:
                for dictionary in _assigned(argument, function):
                    fields |= _keys(dictionary)
            for name in _names(node.args[0], function):
                yield name, fields
        elif isinstance(node, ast.Dict) and "event" in _keys(node):
            (value,) = (
                value
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant) and key.value == "event"
            )
            for name in _names(value, function):
                yield name, _keys(node) - {"event"}


def _names(node: ast.expr, function: ast.FunctionDef) -> set[str]:
    """Return the names that an expression may stand for."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.IfExp):
        return _names(node.body, function) | _names(node.orelse, function)
    found: set[str] = set()
    for value in _assigned(node, function):
        if value is not node:
            found |= _names(value, function)
    return found | (_looped_over(node.id, function) if isinstance(node, ast.Name) else set())


def _assigned(node: ast.expr, function: ast.FunctionDef) -> list[ast.expr]:
    """Return what a function assigns to a variable; anything else is itself."""
    if not isinstance(node, ast.Name):
        return [node]
    return [
        one.value
        for one in ast.walk(function)
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name) and target.id == node.id
    ]


def _looped_over(variable: str, function: ast.FunctionDef) -> set[str]:
    """Return the literal keys of the dicts that a loop takes a variable from."""
    dicts: set[str] = set()
    for one in ast.walk(function):
        if isinstance(one, ast.For) and variable in _identifiers(one.target):
            dicts |= _identifiers(one.iter)
    return {
        target.slice.value
        for one in ast.walk(function)
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Subscript)
        and _identifiers(target.value) & dicts
        and isinstance(target.slice, ast.Constant)
        and isinstance(target.slice.value, str)
    }


def _keys(node: ast.expr) -> set[str]:
    """Return the keys of a dict that are literals."""
    keys = node.keys if isinstance(node, ast.Dict) else []
    return {key.value for key in keys if isinstance(key, ast.Constant)}


def _identifiers(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
