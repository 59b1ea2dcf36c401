"""One entry for each setting: its name, its type, its default, and what it means.

Names, types and meanings are those of the settings' classes, defaults those that `conf/` composes
to. The sections that take anything (`model`, the components of `data`, `deepspeed`) have no class:
their entries are what the files of `conf/` set there, and mean what the comments say.
"""

import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from launcher import schema
from launcher.config import Settings
from launcher.launch_settings import Launch, LaunchSettings
from launcher.reference import choices
from launcher.reference.fields import meanings_of, type_in_words, value_in_words

WHOLE_RUN = "The whole run"
"""The title of what belongs to no section."""

COMPONENTS = "data.components.NAME"

OTHER_CHOICES = "Other choices"
_ABOUT_OTHER_CHOICES = (
    "Files of `conf/` that set what they like, in any section, before what the command line says. "
    "By default none of them is chosen."
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One setting. The texts are Markdown."""

    name: str
    type: str
    """Empty in sections that take anything."""
    default: str | None
    """As it is written on a command line; empty where it must be given, None where it depends."""
    meaning: str
    of: tuple[str, ...] = ()
    """The choices that have it, where others have not."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """One choice of a group, which sets several settings at once."""

    name: str
    """As it is chosen: `data=tokens`."""
    about: str
    sets: tuple[str, ...]
    """`NAME=VALUE` wherever it differs from what is chosen by default."""


@dataclasses.dataclass(frozen=True)
class Section:
    """What stands under one heading: a setting's name, or a choice such as `launch=slurm`."""

    title: str
    about: str
    entries: tuple[Entry, ...] = ()
    presets: tuple[Preset, ...] = ()


@cache
def sections() -> tuple[Section, ...]:
    """Return all sections, in the order of `Settings`. Composes every choice: about a second."""
    return tuple(_sections())


def _sections() -> Iterator[Section]:
    meanings, hints = meanings_of(Settings), typing.get_type_hints(Settings)
    kinds = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    groups = {name for name, hint in hints.items() if hint == Mapping[str, Any]}
    alone = [name for name in hints if name not in {"launch", *kinds, *groups}]
    whole = (_entry(name, hints[name], meanings[name], _composed()) for name in alone)
    yield Section(WHOLE_RUN, "", tuple(whole))
    for name, about in meanings.items():
        if name in kinds:
            entries = tuple(_entries(kinds[name], name, _composed()))
            yield Section(name, about, entries, _presets(name))
        if name in groups:
            yield Section(name, about)
            yield from _sections_of_choices(name)
        if name == "launch":
            yield from _launch_sections(about)
        if name == "data":
            yield _components_section()
    others = [group for group in choices.groups() if group not in hints]
    presets = (preset for group in others for preset in _presets(group))
    yield Section(OTHER_CHOICES, _ABOUT_OTHER_CHOICES, (), tuple(presets))


def _entries(kind: Any, path: str, composed: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield an entry for each field of a dataclass, and for those of the classes it holds."""
    meanings, hints = meanings_of(kind), typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, hint = f"{path}.{field.name}", hints[field.name]
        if field.name == "kind":  # tells the choices of a group apart: nobody sets it
            continue
        yield _entry(name, hint, meanings[field.name], composed)
        for inner in filter(dataclasses.is_dataclass, typing.get_args(hint)):
            is_list = typing.get_origin(hint) is tuple
            yield from _entries(inner, f"{name}[]" if is_list else name, composed)


def _entry(name: str, hint: Any, meaning: str, composed: Mapping[str, Any]) -> Entry:
    value: Any = composed
    for word in name.split("."):
        if not isinstance(value, Mapping) or word not in value:
            return Entry(name, type_in_words(hint), None, meaning)
        value = value[word]
    # What data sets there are is no value of a setting: each choice has its own.
    default = None if name == "data.components" else value_in_words(value)
    return Entry(name, type_in_words(hint), default, meaning)


def _launch_sections(about: str) -> Iterator[Section]:
    shared = {field.name for field in dataclasses.fields(LaunchSettings)}
    entries = tuple(_entries(LaunchSettings, "launch", _composed()))
    yield Section("launch", f"{about} These settings are the same for every choice.", entries)
    for kind in typing.get_args(Launch):
        (name,) = typing.get_args(typing.get_type_hints(kind)["kind"])
        own = _entries(kind, "launch", _composed(f"launch={name}"))
        entries = tuple(one for one in own if one.name.removeprefix("launch.") not in shared)
        yield Section(f"launch={name}", inspect.getdoc(kind) or "", entries)


def _sections_of_choices(group: str) -> Iterator[Section]:
    for choice in choices.of_group(group):
        values = _composed(f"{group}={choice.name}")[group]
        entries = (
            Entry(
                f"{group}.{key}", "", value_in_words(value), choices.comment_on(key, group, choice)
            )
            for key, value in _leaves(values)
        )
        yield Section(f"{group}={choice.name}", choice.about, tuple(entries))


def _components_section() -> Section:
    """Describe what the choices of `data` set of their components, each thing once."""
    having: dict[Entry, list[str]] = {}
    everywhere = choices.of_group("data")
    for choice in everywhere:
        components = _composed(f"data={choice.name}")["data"]["components"]
        for component, values in components.items():
            for key, value in _leaves(values):
                said = choices.comment_on(f"components.{component}.{key}", "data", choice)
                entry = Entry(f"{COMPONENTS}.{key}", "", value_in_words(value), said)
                names = having.setdefault(entry, [])
                if choice.name not in names and key != "_target_":  # that is among the presets
                    names.append(choice.name)
    keys = [entry.name for entry in having]  # equal names are put beside each other
    entries = (
        dataclasses.replace(entry, of=() if len(names) == len(everywhere) else tuple(names))
        for entry, names in sorted(having.items(), key=lambda item: keys.index(item[0].name))
        if names
    )
    return Section(COMPONENTS, "", tuple(entries))


def _presets(group: str) -> tuple[Preset, ...]:
    return tuple(
        Preset(f"{group}={choice.name}", choice.about, tuple(_sets(f"{group}={choice.name}")))
        for choice in choices.of_group(group)
    )


def _sets(preset: str) -> Iterator[str]:
    for key, value, _ in schema.differences(_composed(preset), _composed()):
        if isinstance(value, Mapping) and "_target_" in value:  # a component: its class says it
            yield f"{key}._target_={value['_target_']}"
        elif value != schema.NOT_SET:
            yield f"{key}={value_in_words(value)}"


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@cache
def _composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_module(config_module="conf", version_base="1.3"):
        config = compose("config", overrides=list(overrides))
    return typing.cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
