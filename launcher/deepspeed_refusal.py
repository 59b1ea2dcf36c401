"""What DeepSpeed says of a configuration that it refuses, in the names that the user gave.

DeepSpeed 0.19.8 checks most sections as pydantic models. Their errors say which model (`title`) and
where in it (`loc`), but not under which section it stands.
"""

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deepspeed
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError

from launcher.errors import nearest


def explain_refusal(error: Exception, section: Mapping[str, Any]) -> str:
    """Return a line for each setting that DeepSpeed's error is about.

    Args:
        error: what DeepSpeed raised.
        section: the `deepspeed` section that it was given.
    """
    if not isinstance(error, ValidationError):
        return f"deepspeed: DeepSpeed {deepspeed.__version__} refuses the settings: {error}"
    lines = []
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"])
        path = _path_to(section, key, "deepspeed")
        hint = ""
        if detail["type"] == "extra_forbidden":
            *place, unknown = (str(part) for part in detail["loc"])
            hint = f" {nearest(unknown, _fields_of(error.title, place))}"
        lines.append(f"{path}={detail['input']!r}: DeepSpeed says: {detail['msg']}.{hint}")
    return "\n".join(lines)


def _fields_of(title: str, place: Sequence[str]) -> set[str]:
    """Return the keys of DeepSpeed's model of that name, or of the section at a place in it."""
    (model,) = (kind for kind in _models(DeepSpeedConfigModel) if kind.__name__ == title)
    for name in place:
        annotation = model.model_fields[name].annotation  # the section's model, or that or None
        model = next(iter(typing.get_args(annotation)), annotation)
    return {field.alias or name for name, field in model.model_fields.items()}


def _models(kind: Any) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _models(one)


def _path_to(section: Mapping[str, Any], key: str, path: str) -> str:
    """Return the full name of the deepest part of a section's key that `key` names."""
    for name, value in section.items():
        if name == key.split(".", maxsplit=1)[0]:
            return f"{path}.{key}"
        if isinstance(value, Mapping):
            found = _path_to(value, key, f"{path}.{name}")
            if found.endswith(key):
                return found
    return path
