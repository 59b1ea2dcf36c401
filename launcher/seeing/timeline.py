"""A run's attempts, put together from its records.

An attempt that was killed has no end on record: it lasted until the last thing that it wrote.
Which steps count is decided as the engine does it: a later attempt that began at an earlier step
has taken back what came after that step.
"""

import bisect
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.seeing import lines
from launcher.seeing.columns import Step, Steps, Written
from launcher.seeing.lines import Record
from launcher.seeing.records import Records, when


@dataclass
class Attempt:
    """One start of a run.

    number      None where it never came as far as holding the run
    span        when it began, and when it ended or wrote its last record, in seconds since the
                epoch; None where no record has a time
    held_at     when it had the run, and an older attempt had not any more; None if it never did
    from_step   where it went on; None if it never did
    exit_code, cause  None where it was killed, or still runs
    written     its steps and events
    details     its first record: host, pid, nodes, world_size, started_by, slurm_job, overrides
    """

    number: int | None = None
    span: tuple[float, float] | None = None
    held_at: float | None = None
    from_step: int | None = None
    exit_code: int | None = None
    cause: str | None = None
    written: Written = field(default_factory=Written)
    details: Record = field(default_factory=dict)

    @property
    def steps(self) -> Steps:
        """Its lines of metrics.jsonl."""
        return self.written.steps

    @property
    def last_step(self) -> int | None:
        """The last step that it finished, as far as is known."""
        return self.steps.step[-1] if self.steps else self.from_step

    @property
    def has_ended(self) -> bool:
        """Whether it said how it ended."""
        return self.exit_code is not None

    @property
    def overrides(self) -> list[str]:
        """The command line's, as far as they are on record."""
        found = self.details.get("overrides")
        return [lines.text(one) for one in found] if isinstance(found, list) else []

    def detail(self, name: str) -> str:
        """Return a field of its first record for people; a question mark where it has none."""
        return lines.text(self.details.get(name, "?"))

    def take(self, record: Record) -> None:
        """Take a line of attempts.jsonl."""
        self.written.saw(at := when(record))
        self.number = _integer(record.get("attempt"), self.number)
        self.from_step = _integer(record.get("from_step"), self.from_step)
        if record["event"] == "bring_up":
            self.details = record
        elif record["event"] == "start":
            self.held_at = None if math.isnan(at) else at
        elif record["event"] == "end":
            self.exit_code = _integer(record.get("exit_code"), None)
            self.cause = lines.text(record["cause"]) if "cause" in record else None


def attempts_of(records: Records) -> list[Attempt]:
    """Return the attempts of a run, in the order in which they held it."""
    by_start: dict[str, Attempt] = {}
    for record in records.attempts:
        by_start.setdefault(record["start_id"], Attempt()).take(record)
    found = list(by_start.values())
    numbered = {attempt.number: attempt for attempt in found if attempt.number is not None}
    for number, written in records.by_attempt.items():
        attempt = numbered.get(number) or _nameless(found, written)
        if attempt is None:  # its lines of attempts.jsonl are lost: what it did is not
            found.append(attempt := Attempt())
        attempt.number = number
        if attempt.from_step is None and written.steps:
            attempt.from_step = written.steps.step[0] - 1
        for at in attempt.written.span or ():
            written.saw(at)
        attempt.written = written
    for attempt in found:
        attempt.span = attempt.written.span
    found = _in_order(found)
    _find_kept(found)
    return found


def newest_kept(attempts: Sequence[Attempt], count: int) -> list[Step]:
    """Return the last steps that the run's state descends from, at most so many, by step."""
    newest: list[Step] = []
    for attempt in reversed(attempts):
        for row in range(len(attempt.steps) - 1, -1, -1):
            if attempt.steps.kept[row]:
                newest.append(attempt.steps[row])
                if len(newest) == count:
                    return newest[::-1]
    return newest[::-1]


def living(attempts: Sequence[Attempt]) -> Attempt | None:
    """Return which attempt lives, of a run that does: the one that has the run, or waits for it.

    None where all have said how they ended; writers may be at work still.
    """
    waiting = None
    for attempt in reversed(attempts):
        if attempt.number is not None:
            return waiting if attempt.has_ended else attempt
        if waiting is None and not attempt.has_ended:
            waiting = attempt
    return waiting


def _nameless(attempts: Sequence[Attempt], written: Written) -> Attempt | None:
    """Return the attempt that must have written something before its number was on record.

    One that ended while it resumed, say: the newest start without a number that began before, and
    lasted as long.
    """
    if written.span is None:
        return None
    first, last = written.span
    candidates = [
        (span[0], place)
        for place, attempt in enumerate(attempts)
        if attempt.number is None and (span := attempt.written.span) is not None
        if span[0] <= first and (last <= span[1] or not attempt.has_ended)
    ]
    return attempts[max(candidates)[1]] if candidates else None


def _in_order(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Sort by number; one without a number stays behind the one that began before it."""
    places: list[tuple[int, Attempt]] = []
    for attempt in attempts:
        before = places[-1][0] if places else -1
        places.append((before if attempt.number is None else attempt.number, attempt))
    return [attempt for _, attempt in sorted(places, key=lambda place: place[0])]


def _find_kept(attempts: Sequence[Attempt]) -> None:
    """Find out, of every step, whether the run's state descends from it.

    What a damaged file has twice, or out of order, counts once.
    """
    kept, owners, rows = array("q"), array("q"), array("q")
    for owner, attempt in enumerate(attempts):
        attempt.steps.kept = bytearray(len(attempt.steps))
        if attempt.from_step is not None:
            end = bisect.bisect_right(kept, attempt.from_step)
            del kept[end:], owners[end:], rows[end:]
        newest = kept[-1] if kept else 0
        for row, step in enumerate(attempt.steps.step):
            if step > newest:
                newest = step
                kept.append(step)
                owners.append(owner)
                rows.append(row)
    for owner, row in zip(owners, rows, strict=True):
        attempts[owner].steps.kept[row] = 1


def _integer(value: Any, otherwise: int | None) -> int | None:
    return value if type(value) is int else otherwise
