"""The files of conf/data: each names a data set that takes what it sets."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

import engine.stream
from engine.stream import Windows
from launcher.config import settings_from

CONF = Path(__file__).parents[2] / "conf" / "data"
NAMES = sorted(path.stem for path in CONF.glob("[!_]*.yaml"))  # _common is part of each of them


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_an_argument_of_the_data_set(name: str) -> None:
    overrides = [f"data={name}"]
    if name != "stdlib":
        overrides.append("data.components.tokens.path=somewhere")
    with initialize_config_module("conf", version_base="1.3"):
        settings = settings_from(compose("config", overrides=overrides), Path("/"))
    for component, section in settings.data.components.items():
        module, _, target = section["_target_"].rpartition(".")
        kind = getattr(importlib.import_module(module), target)
        given = {key for key in section if key not in ("_target_", "weight", "epochs")}
        arguments = set(inspect.signature(kind).parameters) - {"component"}
        assert given == arguments, component


def test_every_data_set_over_files_has_a_file_of_settings() -> None:
    targets = {
        value
        for name in NAMES
        for line in (CONF / f"{name}.yaml").read_text().splitlines()
        for key, _, value in [line.strip().partition("_target_: engine.stream.")]
        if value
    }
    kinds = {
        name
        for name in engine.stream.__all__
        if isinstance(getattr(engine.stream, name), type)
        and issubclass(getattr(engine.stream, name), Windows)
    }
    assert targets == kinds - {"Windows", "TokenWindows"}
