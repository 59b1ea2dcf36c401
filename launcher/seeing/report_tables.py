"""The tables of a report's page, and its notes, as HTML. Every value is escaped here."""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from engine import describe
from engine.describe import duration_text
from launcher.seeing.lines import text
from launcher.seeing.status import began_of, ending_of
from launcher.seeing.summary import Summary

_MEANINGS = {
    "kept": "steps that the run's state descends from",
    "lost": "steps that a later attempt took back",
    "starting": "processes, imports, the model",
    "resuming": "choosing, verifying and reading a checkpoint",
    "saving": "training stood still for a save",
    "stopping": "after the last step: the last commit, and the end",
    "down": "between attempts: in the queue, or until somebody noticed",
    "other": "what is between the steps; the last of a killed attempt",
}
_MOST_ROWS = 200
_NUMBERS = {"For", "From", "To", "Ranks", "Seconds", "Share", "Step", "Size", "Age"}
_PROSE = {"Ended", "Overrides", "State", "What it is"}


def times(seconds: Mapping[str, float]) -> str:
    """Return the wall time by cause, with the colours of the figure's bar."""
    wall = sum(seconds.values())
    if not wall:
        return ""
    rows = [
        (cause, f"{spent:,.1f}", f"{spent / wall:.1%}", _MEANINGS[cause])
        for cause, spent in seconds.items()
    ]
    return _table(("Time", "Seconds", "Share", "What it is"), rows, coloured=True)


def attempts(run: Summary) -> str:
    """Return the attempts with their causes, the newest of very many."""
    if not run.attempts:
        return '<p class="muted">No attempt is on record.</p>\n'
    rows = []
    before = None
    for attempt in run.attempts[-_MOST_ROWS:]:
        overrides = " ".join(attempt.overrides)
        rows.append(
            (
                "-" if attempt.number is None else str(attempt.number),
                "not yet" if run.lives(attempt) else ending_of(attempt),
                "-" if attempt.from_step is None else f"{attempt.from_step:,}",
                "-" if attempt.last_step is None else f"{attempt.last_step:,}",
                duration_text(attempt.span[1] - attempt.span[0]) if attempt.span else "?",
                began_of(attempt),
                attempt.detail("world_size"),
                attempt.detail("host"),
                "as before" if overrides and overrides == before else overrides,
            )
        )
        before = overrides
    headings = ("Attempt", "Ended", "From", "To", "For", "Began", "Ranks", "Host", "Overrides")
    return _earlier(len(run.attempts)) + _table(headings, rows)


def checkpoints(run: Summary) -> str:
    """Return the committed checkpoints, and the saves under way."""
    rows = []
    for one in run.checkpoints[-_MOST_ROWS:]:
        if one.manifest is None:
            rows.append((one.name, "?", "?", "?", f"{one.state}: {text(one.error)}"))
            continue
        staged = datetime.datetime.fromisoformat(one.manifest.staged_at).timestamp()
        size = describe.size_text(describe.total_bytes(one.manifest))
        age = duration_text(run.now - staged)
        rows.append((one.name, f"{one.manifest.step:,}", size, age, one.state))
    for save in run.life.in_flight:
        rows.append((save.tag, "", "", "", save.words(run.expected_bytes)))
    if not rows:
        return '<p class="muted">No checkpoint is committed.</p>\n'
    return _earlier(len(run.checkpoints)) + _table(("Tag", "Step", "Size", "Age", "State"), rows)


def notes(run: Summary) -> str:
    """Return what could not be read."""
    if not run.notes:
        return '<p class="muted">All records could be read.</p>\n'
    items = "".join(f"<li>{escape(note)}</li>\n" for note in run.notes)
    return f'<ul class="notes">\n{items}</ul>\n'


def _earlier(count: int) -> str:
    if count <= _MOST_ROWS:
        return ""
    return f'<p class="muted">The last {_MOST_ROWS} of {count:,}.</p>\n'


def _table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, coloured: bool = False
) -> str:
    """Return a table that scrolls sideways where it has no room."""
    kinds = [
        "number" if name in _NUMBERS else "prose" if name in _PROSE else "" for name in headings
    ]
    head = "".join(
        f'<th scope="col" class="{kind}">{name}</th>'
        for kind, name in zip(kinds, headings, strict=True)
    )
    body = []
    for row in rows:
        cells = [
            f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True)
        ]
        if coloured:
            swatch = f'<span class="key swatch" style="--tone: var(--{row[0]})"></span>'
            cells[0] = f"<td>{swatch}{escape(row[0])}</td>"
        body.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<div class="wide-table" tabindex="0">\n<table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(body)}</tbody>\n</table>\n</div>\n"
    )
