"""docs/records.md as a program reads it, and a run's records held against it."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "records.md"

_IS = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
    "list of strings": lambda value: isinstance(value, list) and all(map(_IS["string"], value)),
    "list of integers": lambda value: isinstance(value, list) and all(map(_IS["integer"], value)),
}


@dataclass(frozen=True)
class Event:
    """One row of the tables of events."""

    required: frozenset[str]
    optional: frozenset[str]
    is_loud: bool


@dataclass(frozen=True)
class Page:
    """What the page says.

    lines    the fields of each kind of line, with their types: `bring_up`, `metrics.jsonl`, ...
    events   by name
    metrics  the type of each metric of metrics.prom
    """

    lines: dict[str, dict[str, str]]
    events: dict[str, Event]
    metrics: dict[str, str]


@functools.cache
def page() -> Page:
    """Read the page. Every table there is one of fields, of events, of metrics, or of files."""
    found = Page({}, {}, {})
    section = what = table = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = what = line.removeprefix("## ")
        elif match := re.match(r"`(\w+)`: ", line):
            what = match[1]
        if not line.startswith("|"):
            table = ""
            continue
        if not table:
            table = line
            continue
        first, second, *_ = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`(\w+)`", first)
        if table.startswith("| field ") and names:
            kinds = second.split(", ")
            assert len(names) == len(kinds), line
            found.lines.setdefault(what, {}).update(zip(names, kinds, strict=True))
        elif table.startswith("| event ") and names:
            (name,) = names
            fields = re.findall(r"`(\w+)`(\??)", second)
            found.events[name] = Event(
                frozenset(field for field, mark in fields if not mark),
                frozenset(field for field, mark in fields if mark),
                is_loud="**W**" in first,
            )
        elif table.startswith("| metric ") and names:
            assert section == "metrics.prom"
            found.metrics[names[0]] = second
    return found


def undocumented(run: Path) -> list[str]:
    """Return what the records of a run have that the page does not say, or say otherwise."""
    wrong = []
    for record in _records(run, "attempts.jsonl"):
        wrong += _against(f"attempts.jsonl, {record['event']}", record, record["event"])
    for name in ("metrics.jsonl", "rollbacks.jsonl"):
        for record in _records(run, name):
            wrong += _against(name, record, name)
    for record in _records(run, "events.jsonl"):
        wrong += _against_events(record)
    for line in (run / "metrics.prom").read_text().splitlines():
        if line.startswith("# TYPE everstep_"):
            name, kind = line.removeprefix("# TYPE everstep_").split(" ")
            if page().metrics.get(name) != kind:
                wrong.append(f"metrics.prom: {name} is a {kind}")
    return sorted(set(wrong))


def _records(run: Path, name: str) -> list[dict[str, Any]]:
    if not (run / name).exists():
        assert name in ("events.jsonl", "rollbacks.jsonl"), f"a run without {name}"
        return []
    lines = (run / name).read_text(encoding="utf-8").splitlines()
    whole = [line for line in lines if line.endswith("}")]  # what was killed may be cut short
    return [json.loads(line) for line in whole]


def _against(where: str, record: dict[str, Any], kind: str) -> list[str]:
    fields = page().lines.get(kind)
    if fields is None:
        return [f"{where}: no such line"]
    different = record.keys() ^ fields.keys()
    wrong = [f"{where}: {name} is there on one side only" for name in different]
    for name in record.keys() & fields.keys():
        wrong += _type_of(where, name, record[name], fields[name])
    return wrong


def _against_events(record: dict[str, Any]) -> list[str]:
    kind = record["event"]
    where = f"events.jsonl, {kind}"
    event, types = page().events.get(kind), page().lines["events.jsonl"]
    if event is None:
        return [f"{where}: no such event"]
    fields = record.keys() - {"time", "attempt", "event", "rank"}
    wrong = [f"{where}: has {name}" for name in fields - event.required - event.optional]
    wrong += [f"{where}: lacks {name}" for name in event.required - fields]
    for name in fields & types.keys():
        wrong += _type_of(where, name, record[name], types[name])
    wrong += _type_of(where, "time", record["time"], "string")
    wrong += _type_of(where, "attempt", record["attempt"], "integer or null")
    return wrong


def _type_of(where: str, name: str, value: Any, kinds: str) -> list[str]:
    if any(_IS[kind](value) for kind in kinds.split(" or ")):
        return []
    return [f"{where}: {name} is {value!r}, and no {kinds}"]
