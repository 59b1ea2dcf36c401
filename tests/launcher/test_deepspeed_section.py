"""The list of DeepSpeed's keys against the DeepSpeed that is installed."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import deepspeed
from deepspeed.profiling import constants as profiler
from deepspeed.runtime import config, constants
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

from launcher.deepspeed_section import (
    DERIVED_KEYS,
    KEYS_OF_VERSION,
    KNOWN_KEYS,
    KNOWN_KEYS_OF_SECTIONS,
)


def named(module: ModuleType, *prefixes: str) -> set[str]:
    """Return the keys among a module's constants: those that are words, and not defaults."""
    return {
        value
        for name, value in vars(module).items()
        if name.startswith(prefixes) and not name.endswith(("_DEFAULT", "_FORMAT"))
    }


def test_the_list_was_made_for_the_installed_version() -> None:
    assert deepspeed.__version__ == KEYS_OF_VERSION


def test_every_known_key_is_one_that_deepspeed_reads() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in Path(deepspeed.__file__).parent.rglob("*.py")
    )
    quoted = set(re.findall(r"""["']([a-z0-9_]+)["']""", source))
    assert KNOWN_KEYS - quoted == set()
    assert DERIVED_KEYS.keys() - quoted == set()


def test_the_keys_of_sections_are_those_that_deepspeed_reads() -> None:
    autocast = named(constants, "TORCH_AUTOCAST") - {constants.TORCH_AUTOCAST}
    dtypes = ("GRAD_ACCUM_DTYPE", "PARAM_DTYPE", "BUFFER_DTYPE", "KEEP_IN_FP32_MODULES")
    assert {
        "activation_checkpointing": ACT_CHKPT_DEFAULT.keys(),
        "aio": AIO_DEFAULT_DICT.keys(),
        "data_types": named(constants, *dtypes),
        "flops_profiler": named(profiler, "FLOPS_PROFILER_"),
        "torch_autocast": autocast,
    } == KNOWN_KEYS_OF_SECTIONS


def test_no_known_key_is_one_that_deepspeed_has_removed() -> None:
    assert KNOWN_KEYS & config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() == set()
