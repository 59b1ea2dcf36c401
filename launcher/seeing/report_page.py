"""Puts a report's page together: one HTML file with its style and its figures in it, no script.

Whatever comes from a record is escaped where it enters the page.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from engine import describe
from engine.describe import counted, duration_text
from launcher.seeing import report_tables
from launcher.seeing.life import ENDED
from launcher.seeing.report_canvas import DARK, LIGHT
from launcher.seeing.report_limits import Limits
from launcher.seeing.report_series import LossSeries
from launcher.seeing.status import state_of
from launcher.seeing.summary import Summary, loss_text


@dataclass(frozen=True)
class Shown:
    """A figure on the page: its `svg` elements, for wide and narrow pages, and its caption."""

    svg: str
    caption: str


@dataclass(frozen=True)
class _Key:
    """One line of a legend: `mark` is a character; where it is empty, a stroke is drawn."""

    role: str
    mark: str
    text: str
    style: str = ""


def page(
    run: Summary, loss: LossSeries, figures: Mapping[str, Shown], limits: Limits | None
) -> str:
    """Return the whole page.

    Args:
        figures: `loss`, `saves` and `time`; those without anything to show are not in it.
    """
    wall = run.goodput.by_cause()
    sections = [
        ("Loss", _figure(figures, "loss", _loss_keys(loss))),
        ("What the saves took", _figure(figures, "saves", _save_keys(limits))),
        ("Where the wall time went", _figure(figures, "time", []) + report_tables.times(wall)),
        ("Attempts", report_tables.attempts(run)),
        ("Checkpoints", report_tables.checkpoints(run)),
        ("Notes", report_tables.notes(run)),
    ]
    body = "".join(f"<section>\n<h2>{name}</h2>\n{text}</section>\n" for name, text in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)}: {escape(state_of(run))}</title>\n"
        '<link rel="icon" href="data:,">\n'  # else a browser asks for one
        f"<style>\n{_style()}</style>\n</head>\n<body>\n{_head(run)}"
        f"<main>\n{body}</main>\n{_foot(run)}</body>\n</html>\n"
    )


def _style() -> str:
    sheet = resources.files("launcher.seeing").joinpath("report.css").read_text(encoding="utf-8")
    light, dark = (
        "".join(f" --{role}: {colour};" for role, colour in palette.items())
        for palette in (LIGHT, DARK)
    )
    return (
        f":root {{{light} }}\n@media (prefers-color-scheme: dark) {{ :root {{{dark} }} }}\n{sheet}"
    )


def _head(run: Summary) -> str:
    tone = "good" if run.is_complete else "live" if run.life.state != ENDED else "bad"
    facts = [
        ("Step", f"{run.step:,}", "" if run.total_steps is None else f"of {run.total_steps:,}"),
        ("Loss", *_loss(run)),
        ("Goodput", f"{run.goodput.share:.1%}", f"of {duration_text(run.goodput.wall)}"),
        ("Attempts", *_attempts(run)),
        ("Checkpoints", *_health(run)),
    ]
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)} <small>{escape(note)}</small></dd></div>\n"
        for name, value, note in facts
    )
    return (
        f'<header>\n<h1>{escape(run.name)}</h1>\n<p class="state {tone}">{escape(state_of(run))}'
        f'</p>\n<dl class="figures-of-merit">\n{items}</dl>\n</header>\n'
    )


def _loss(run: Summary) -> tuple[str, str]:
    if run.newest is None:
        return "-", "no step is on record"
    return loss_text(run.newest.loss), f"at step {run.newest.step:,}"


def _attempts(run: Summary) -> tuple[str, str]:
    broken = sum(run.broke_off(attempt) for attempt in run.attempts)
    note = f"{broken} broke off; " if broken else ""
    return f"{len(run.attempts):,}", note + f"{counted(run.goodput.lost_steps, 'step')} lost"


def _health(run: Summary) -> tuple[str, str]:
    whole = [one.manifest for one in run.checkpoints if one.manifest is not None]
    damaged = len(run.checkpoints) - len(whole)
    value = f"{len(whole)}" + (f", and {damaged} damaged" if damaged else "")
    if not whole:
        return value, "none that can be read"
    staged = datetime.datetime.fromisoformat(whole[-1].staged_at).timestamp()
    size = describe.size_text(describe.total_bytes(whole[-1]))
    return value, f"newest: step {whole[-1].step:,}, {duration_text(run.now - staged)} old, {size}"


def _figure(figures: Mapping[str, Shown], name: str, keys: Sequence[_Key]) -> str:
    if name not in figures:
        return '<p class="muted">Nothing of it is on record.</p>\n'
    legend = "".join(
        f'<li><span class="key {key.style}" style="--tone: var(--{key.role})" aria-hidden="true">'
        f"{key.mark}</span>{key.text}</li>"
        for key in keys
    )
    return (
        f'<figure id="{name}">\n<ul class="legend">{legend}</ul>\n{figures[name].svg}'
        f"<figcaption>{escape(figures[name].caption)}</figcaption>\n</figure>\n"
    )


def _loss_keys(series: LossSeries) -> list[_Key]:
    """Return a legend of what there is in the figure."""
    keys = [
        (series.kept, _Key("kept", "", "kept steps", "line")),
        (series.lost, _Key("lost", "", "lost steps", "line pale")),
        (series.stored, _Key("saving", "▲", "checkpoint")),
        (series.gone, _Key("saving", "|", "checkpoint, pruned since")),
        ([s for s in series.spans if s.broke_off], _Key("lost", "┊", "attempt broke off")),
        (series.failed_saves, _Key("lost", "✕", "failed save")),
        (series.alarms, _Key("lost", "◆", "alarm")),
        (series.non_finite, _Key("lost", "★", "loss not finite")),
        (series.spans[1:], _Key("band", "", "every other attempt", "swatch")),
    ]
    return [key for there, key in keys if there]


def _save_keys(limits: Limits | None) -> list[_Key]:
    keys = [
        _Key("kept", "▲", "pause"),
        _Key("saving", "●", "write"),
        _Key("down", "■", "until committed"),
    ]
    if limits is not None:
        keys += [_Key("kept", "┅", "memory copy"), _Key("saving", "┅", "raw write")]
    return keys


def _foot(run: Summary) -> str:
    made = datetime.datetime.fromtimestamp(run.now).astimezone()
    return (
        f"<footer>Made by <code>everstep report</code> at {made:%Y-%m-%d %H:%M:%S %Z}, from the "
        "records and manifests of the run. Times are in that zone. Checkpoints were not read for "
        "their digests here; <code>python -m engine verify --all</code> does that.</footer>\n"
    )
