"""The choices of each group of `conf/` (`data=megatron`), with what their files say in comments.

A file tells of itself in the comment it begins with, whose indented lines are an example; and of a
setting in the comment behind its value. Reads the YAML alone: what a choice takes over from others
(`defaults`), and what is wrong with a file, is for composition to say.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

_CONF = files("conf")
_PACKAGE = "@package"  # Hydra's directive, in a comment


@dataclass(frozen=True)
class Choice:
    """One file of a group."""

    name: str
    about: str
    """What its first comment says, on one line; Markdown."""
    keys: Mapping[str, str]
    """The dotted keys that the file itself sets, in its group, and the comment behind each. None
    if it sets those of other sections."""


def groups() -> list[str]:
    """Return the names of all groups but Hydra's own."""
    names = [entry.name for entry in _CONF.iterdir() if entry.is_dir()]
    return sorted(name for name in names if name[0] not in "_." and name != "hydra")


@cache
def of_group(group: str) -> tuple[Choice, ...]:
    """Return the choices of a group, by name; none if there is no such group.

    Names that begin with `_` are what several choices share, and cannot be chosen.
    """
    directory = _CONF / group
    if not directory.is_dir():
        return ()
    names = sorted(file.name for file in directory.iterdir() if file.name.endswith(".yaml"))
    return tuple(
        _read((directory / name).read_text(encoding="utf-8"), name.removesuffix(".yaml"))
        for name in names
        if not name.startswith("_")
    )


def comment_on(key: str, group: str, choice: Choice) -> str:
    """Return what a choice's file, or else another's of the group, says of a key.

    A key of another file is the same where its last name is: what `vocab_size` means is said once.
    """
    last = key.rpartition(".")[2]
    elsewhere = (
        comment
        for other in of_group(group)
        for known, comment in other.keys.items()
        if known.rpartition(".")[2] == last
    )
    return next(filter(None, [choice.keys.get(key, ""), *elsewhere]), "")


def having(key: str) -> list[str]:
    """Return the choices, such as `launch=srun`, whose files set a dotted key, or some below it."""
    group, _, rest = key.partition(".")
    return [
        f"{group}={choice.name}"
        for choice in of_group(group)
        if any(f"{known}.".startswith(f"{rest}.") for known in choice.keys)
    ]


def named(last: str) -> list[str]:
    """Return the settings of `conf/` whose dotted name has this last part."""
    everything = [*_keys_of((_CONF / "config.yaml").read_text(encoding="utf-8"))]
    everything += [f"{g}.{key}" for g in groups() for one in of_group(g) for key in one.keys]
    found = dict.fromkeys(key for key in everything if key.rpartition(".")[2] == last)
    return [key for key in found if not key.startswith("hydra.")]


def _read(text: str, name: str) -> Choice:
    about: list[str] = []
    example: list[str] = []
    is_of_its_group = True
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        words = line.removeprefix("# ")
        if words.startswith(_PACKAGE):
            is_of_its_group = False
        else:
            (example if words.startswith("  ") else about).append(words.strip())
    keys = _keys_of(text) if is_of_its_group else {}
    said = " ".join(about) + "".join(f" `{line}`" for line in example)
    return Choice(name, said, keys)


def _keys_of(text: str) -> dict[str, str]:
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return {}
    return dict(_keys(root, text.splitlines(), "")) if isinstance(root, yaml.MappingNode) else {}


def _keys(node: Any, lines: list[str], path: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each entry that holds no further ones, and its comment."""
    for key, value in node.value:
        dotted = f"{path}{key.value}"
        if dotted == "defaults":  # Hydra's
            continue
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _keys(value, lines, f"{dotted}.")
        else:
            is_on_one_line = value.end_mark.line == key.start_mark.line
            behind = lines[key.start_mark.line][value.end_mark.column :] if is_on_one_line else ""
            yield dotted, behind.partition("#")[2].strip()
