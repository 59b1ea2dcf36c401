"""The list of DeepSpeed's keys against the DeepSpeed that is installed."""

from __future__ import annotations

import re
from pathlib import Path

import deepspeed
from deepspeed.runtime import config

from launcher.deepspeed_section import DERIVED_KEYS, KEYS_OF_VERSION, KNOWN_KEYS


def test_the_list_was_made_for_the_installed_version() -> None:
    assert deepspeed.__version__ == KEYS_OF_VERSION


def test_every_known_key_is_one_that_deepspeed_reads() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in Path(deepspeed.__file__).parent.rglob("*.py")
    )
    quoted = set(re.findall(r"""["']([a-z0-9_]+)["']""", source))
    assert KNOWN_KEYS - quoted == set()
    assert DERIVED_KEYS.keys() - quoted == set()


def test_no_known_key_is_one_that_deepspeed_has_removed() -> None:
    assert KNOWN_KEYS & config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() == set()
