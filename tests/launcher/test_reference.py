"""What people are told of the settings is what the settings are."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from launcher import requeue, tools, train
from launcher.config import Settings
from launcher.reference import choices, lookup
from launcher.reference.entries import COMPONENTS, Entry, sections
from launcher.reference.fields import meanings_of, type_in_words, value_in_words
from launcher.reference.page import markdown
from tests.launcher.test_config import compose

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
CHOICES = [
    f"{group}={choice.name}" for group in choices.groups() for choice in choices.of_group(group)
]


@pytest.fixture(autouse=True)
def _process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["everstep"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")


def entries() -> list[Entry]:
    return [entry for section in sections() for entry in section.entries]


def classes_of(hint: object) -> set[type]:
    """Return the dataclasses that a type holds, at any depth."""
    found = {hint} if dataclasses.is_dataclass(hint) else set()
    inner = typing.get_type_hints(hint).values() if found else typing.get_args(hint)
    return found.union(*map(classes_of, inner))


def test_the_page_is_what_the_settings_are() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "docs/settings.md is old: run `make docs`"
    )


def test_every_field_of_a_settings_class_says_what_it_means() -> None:
    classes = classes_of(Settings)
    assert len(classes) > 10
    for kind in classes:
        silent = [name for name, meaning in meanings_of(kind).items() if not meaning]
        assert not silent, f"{kind.__name__}: no text under {silent}"


def test_every_setting_and_choice_of_conf_says_what_it_means() -> None:
    silent = [entry.name for entry in entries() if not entry.meaning]
    silent += [one.name for section in sections() for one in section.presets if not one.about]
    assert not silent, f"no comment in conf/ behind or above {silent}"


def test_every_leaf_of_what_is_composed_by_default_has_an_entry() -> None:
    known = {entry.name for entry in entries()}

    def leaves(values: dict[str, object], path: str) -> list[str]:
        found = []
        for key, value in values.items():
            inside = isinstance(value, dict) and value and f"{path}{key}" not in known
            found += leaves(value, f"{path}{key}.") if inside else [f"{path}{key}"]
        return found

    assert set(leaves(compose().as_dict(), "")) - known == {"launch.kind"}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_sets_nothing_that_no_class_has(choice: str) -> None:
    """And what must be given with it suffices."""
    overrides = [choice]
    for section in sections():
        for entry in section.entries:
            of = {f"data={name}" for name in entry.of} or {section.title}
            if entry.default == "" and choice in of:
                name = entry.name.replace(COMPONENTS, "data.components.tokens")
                overrides.append(f"{name}={1 if entry.type == 'whole number' else 'x'}")
    assert isinstance(compose(*overrides), Settings)


def test_a_choice_is_shown_by_what_it_sets() -> None:
    presets = {one.name: one for section in sections() for one in section.presets}
    assert presets["checkpoint=every_step"].sets == ("checkpoint.every_steps=1",)
    assert presets["data=stdlib"].sets == ()  # chosen by default
    assert presets["data=tokens"].sets[-1].endswith("_target_=engine.stream.TokenFile")
    assert "train.steps=30" in presets["experiment=tiny"].sets


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "whole number"),
        (float | None, "number or `null`"),
        (typing.Literal["a", "b", "c"], "`a`, `b` or `c`"),
        (typing.Literal["a"], "`a`"),
        (tuple[str, ...], "list of texts"),
        (tuple[tuple[int, int], ...], "list of lists of 2 whole numbers"),
        (Mapping[str, float], "numbers by name"),
        (Mapping[str, Mapping[str, typing.Any]], "sections by name"),
    ],
)
def test_a_type_in_words(hint: object, words: str) -> None:
    assert type_in_words(hint) == words


def test_a_value_in_words() -> None:
    assert value_in_words([1, True, {"a": None}]) == "[1, true, {a: null}]"
    assert value_in_words("???") == ""


def test_the_help_names_every_tool_and_choice_and_settings_that_exist(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        train.compose(["launch=slurm", "--help"], dict(os.environ))
    said = capfd.readouterr().out
    assert len(said.splitlines()) < 40, "more than a screen"
    for name in tools.NAMES:
        assert f"everstep {name} " in said or name == "--version"
    told = dict(re.findall(r"^  (\w+)= +(.*)$", said, re.MULTILINE))
    assert {group: set(names.split()) for group, names in told.items()} == {
        group: {choice.name for choice in choices.of_group(group)} for group in choices.groups()
    }
    groups = "|".join(compose().as_dict())
    named = set(re.findall(rf"\b(?:{groups})\.[a-z_]+", said))
    assert named > {"run.name", "launch.ranks"}
    assert named <= {entry.name for entry in entries()}


def test_the_version_is_ours_and_not_hydras(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.is_tool(["--version"])
    assert tools.run(["--version"]) == 0
    assert {"everstep", "torch"} <= {
        line.split()[0] for line in capsys.readouterr().out.splitlines()
    }


def test_a_file_of_a_group_that_is_odd_spoils_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    for name, text in (
        ("empty", ""),
        ("list", "- 3\n"),
        ("broken", "a: [1\n"),
        ("long", "a:  # of a\n  b: |\n    text\n  c: 3  # of c"),
    ):
        (tmp_path / "mine" / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(choices, "_CONF", tmp_path)
    keys = {choice.name: choice.keys for choice in choices.of_group("mine")}
    assert keys == {"empty": {}, "list": {}, "broken": {}, "long": {"a.b": "", "a.c": "of c"}}


def test_looking_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert lookup.main(["Lease_"]) == 0
    assert capsys.readouterr().out.startswith(
        "checkpoint.lease_seconds  (number; default 45)\n    A run on another host"
    )
    assert lookup.main(["launch=slurm", "launch.ranks"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "launch.ranks_per_node  (with launch=slurm; whole number; must be given)"
    )
    assert lookup.main(["data=megatron"]) == 0
    assert "_target_=engine.stream.MegatronTokens." in capsys.readouterr().out


def test_looking_up_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert lookup.main(["leese_seconds"]) == lookup.EXIT_USAGE
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "everstep: no setting has leese_seconds. Did you mean 'lease_seconds'?\n",
    )


def test_looking_up_where_a_file_cannot_be_composed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lookup, "sections", lambda: yaml.safe_load("a: [1\nb: 2"))
    assert lookup.main(["seed"]) == requeue.BAD_CONFIG
    assert capsys.readouterr().err.startswith("everstep: ")


def test_without_a_word_the_tool_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.run(["settings"]) == 0
    assert capsys.readouterr().out == markdown()
