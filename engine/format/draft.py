"""The draft: a manifest without its shards, as rank 0's trainer makes it when it stages."""

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.format import names, sealed
from engine.format.entry import Entry
from engine.format.errors import FormatError
from engine.format.fields import Fields
from engine.format.receipt import FORMAT_VERSION, check_version
from engine.format.records import Base, Optimizer, Parameter, lists_of
from engine.format.sealed import JSON


@dataclass(frozen=True)
class ParamGroup:
    """One param group of the optimizer: its settings, without its parameters, as a tree."""

    hyperparameters: JSON


@dataclass(frozen=True)
class Draft:
    """A manifest without its shards.

    save_id         the save it describes
    step            optimizer steps done
    sample_offset   samples consumed by all ranks since the run began
    world_size      ranks that saved, hence shards
    history         (attempt, from step) of each attempt that the state descends from, the oldest
                    first; the last is the one that saved
    parent_save_id  the save that the attempt resumed from; None where it started fresh
    stream          state of the data stream, JSON
    fingerprint     identity of the data, JSON
    parameters      every parameter once: those of the optimizer in the order of its param groups,
                    which is the layout order, then the frozen ones
    whole_entries   entries that every rank stores whole: buffer/<name> and rng/<what>
    param_groups    settings per param group
    optimizer       kind and state of the optimizer
    state           everything else, a tree: scheduler, loss scaler, counters, client state
    versions        library name to version
    staged_at       when the image was complete, ISO 8601 in UTC
    stage_seconds   how long the training was paused for it
    base            identity of the frozen parameters where the shards do not hold them, else None
    """

    save_id: str
    step: int
    sample_offset: int
    world_size: int
    history: tuple[tuple[int, int], ...]
    parent_save_id: str | None
    stream: JSON
    fingerprint: JSON
    parameters: tuple[Parameter, ...]
    whole_entries: tuple[Entry, ...]
    param_groups: tuple[ParamGroup, ...]
    optimizer: Optimizer
    state: JSON
    versions: dict[str, str]
    staged_at: str
    stage_seconds: float
    base: Base | None = field(default=None, kw_only=True)

    @property
    def tag(self) -> str:
        """The tag that the save becomes."""
        return names.SaveId.parse(self.save_id).tag

    @property
    def attempt(self) -> int:
        """The attempt that saved."""
        return names.SaveId.parse(self.save_id).attempt

    def draft_json(self) -> dict[str, JSON]:
        """Return the draft as JSON: what rank 0's receipt holds."""
        return {
            "version": FORMAT_VERSION,
            "tag": self.tag,
            "step": self.step,
            "sample_offset": self.sample_offset,
            "save_id": self.save_id,
            "attempt": self.attempt,
            "history": lists_of(self.history),
            "parent_save_id": self.parent_save_id,
            "world_size": self.world_size,
            "stream": sealed.require_json(self.stream, "stream"),
            "fingerprint": sealed.require_json(self.fingerprint, "fingerprint"),
            "parameters": [parameter.to_json() for parameter in self.parameters],
            "whole_entries": [
                {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape)}
                for entry in self.whole_entries
            ],
            "param_groups": [
                {
                    "hyperparameters": sealed.require_json(
                        group.hyperparameters, f"param_groups[{i}]"
                    )
                }
                for i, group in enumerate(self.param_groups)
            ],
            "base": None if self.base is None else self.base.to_json(),
            "optimizer": self.optimizer.to_json(),
            "state": sealed.require_json(self.state, "state"),
            "versions": dict(self.versions),
            "staged_at": self.staged_at,
            "stage_seconds": self.stage_seconds,
        }

    @classmethod
    def from_json(cls, document: JSON, what: str) -> "Draft":
        """Read a draft strictly; see `Manifest.from_bytes`."""
        return cls(**read_draft(document, what, ()))


_DRAFT_FIELDS = (
    *("version", "tag", "step", "sample_offset", "save_id", "attempt", "history"),
    *("parent_save_id", "world_size", "stream", "fingerprint", "parameters", "whole_entries"),
    *("param_groups", "base", "optimizer", "state", "versions", "staged_at", "stage_seconds"),
)


def read_draft(document: JSON, what: str, more: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of `Draft`. `more` names fields that the caller reads."""
    if not isinstance(document, dict):
        raise FormatError(f"{what}: wanted a JSON object")
    check_version(document, what)
    fields = Fields(document, what, "", (*_DRAFT_FIELDS, *more))
    save_id = names.SaveId.parse(fields.save_id("save_id"))
    step = names.step_of(save_id.tag)
    for name, wanted in (("tag", save_id.tag), ("attempt", save_id.attempt), ("step", step)):
        if type(fields.anything(name)) is not type(wanted) or fields.anything(name) != wanted:
            raise fields.error(name, f"{wanted!r}, as in the save id {save_id}")
    groups = _read_param_groups(fields, what)
    parameters = tuple(
        Parameter.from_json(item, what, f"parameters[{i}]", len(groups))
        for i, item in enumerate(fields.array("parameters"))
    )
    whole_entries = _read_whole_entries(fields, what)
    _check_distinct(parameters, whole_entries, what)
    parent = fields.anything("parent_save_id")
    return {
        "save_id": str(save_id),
        "step": step,
        "sample_offset": fields.integer("sample_offset"),
        "world_size": fields.integer("world_size", 1, names.MAX_WORLD_SIZE),
        "history": _read_history(fields, save_id.attempt),
        "parent_save_id": None if parent is None else fields.save_id("parent_save_id"),
        "stream": fields.anything("stream"),
        "fingerprint": fields.anything("fingerprint"),
        "parameters": parameters,
        "whole_entries": whole_entries,
        "param_groups": groups,
        "base": _read_base(fields, what, parameters),
        "optimizer": Optimizer.from_json(fields.anything("optimizer"), what, len(parameters)),
        "state": fields.anything("state"),
        "versions": _read_versions(fields),
        "staged_at": _read_time(fields),
        "stage_seconds": fields.seconds("stage_seconds"),
    }


def _read_history(fields: Fields, attempt: int) -> tuple[tuple[int, int], ...]:
    history = fields.pairs("history")
    numbers = [number for number, _ in history]
    if not history or numbers != sorted(set(numbers)) or numbers[-1] != attempt:
        raise fields.error("history", f"ascending attempts, the last of them {attempt}")
    return history


def _read_param_groups(fields: Fields, what: str) -> tuple[ParamGroup, ...]:
    return tuple(
        ParamGroup(
            Fields(item, what, f"param_groups[{i}]", ("hyperparameters",)).anything(
                "hyperparameters"
            )
        )
        for i, item in enumerate(fields.array("param_groups"))
    )


def _read_base(fields: Fields, what: str, parameters: Iterable[Parameter]) -> Base | None:
    base = fields.anything("base")
    frozen = sum(not parameter.trainable for parameter in parameters)
    return None if base is None else Base.from_json(base, what, frozen)


def _read_whole_entries(fields: Fields, what: str) -> tuple[Entry, ...]:
    entries = []
    for i, item in enumerate(fields.array("whole_entries")):
        entry = Fields(item, what, f"whole_entries[{i}]", ("name", "dtype", "shape"))
        name = entry.string("name")
        if not name.startswith(("buffer/", "rng/")):
            raise entry.error("name", "buffer/<name> or rng/<what>")
        entries.append(Entry(name, entry.dtype("dtype"), entry.shape("shape")))
    return tuple(entries)


def _read_versions(fields: Fields) -> dict[str, str]:
    versions = fields.anything("versions")
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise fields.error("versions", "an object whose values are strings")
    return versions


def _read_time(fields: Fields) -> str:
    text = fields.string("staged_at")
    try:
        offset = datetime.datetime.fromisoformat(text).utcoffset()
    except ValueError:
        offset = None
    if offset is None or not text.endswith("+00:00"):
        raise fields.error("staged_at", "a time like 2026-01-31T23:59:59+00:00")
    return text


def _check_distinct(
    parameters: Iterable[Parameter], whole_entries: Iterable[Entry], what: str
) -> None:
    """Check that no name of a parameter, alias or whole entry is there twice."""
    seen: set[str] = set()
    for parameter in parameters:
        for name in (parameter.name, *parameter.aliases):
            if name in seen:
                raise FormatError(f"{what}: parameters: the name {name[:200]!r} is there twice")
            seen.add(name)
    seen.clear()
    for entry in whole_entries:
        if entry.name in seen:
            raise FormatError(f"{what}: whole_entries: {entry.name[:200]!r} is there twice")
        seen.add(entry.name)
