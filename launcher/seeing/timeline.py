"""A run's attempts, put together from its records.

An attempt that was killed has no end on record: it lasted until the last thing that it wrote.
Which steps count is decided as the engine does it: a later attempt that began at an earlier step
has taken back what came after that step.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.seeing.records import Record, Records, when


@dataclass
class Attempt:
    """One start of a run.

    number      None where it never came as far as holding the run
    span        when it began, and when it ended or wrote its last record, in seconds since the
                epoch; None where no record has a time
    from_step   where it went on; None if it never did
    exit_code, cause  None where it was killed, or still runs
    steps       its lines of metrics.jsonl, in order
    events      its lines of events.jsonl, in order
    details     its first record: host, pid, nodes, world_size, started_by, slurm_job, overrides
    """

    number: int | None = None
    span: tuple[float, float] | None = None
    from_step: int | None = None
    exit_code: int | None = None
    cause: str | None = None
    steps: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    details: Record = field(default_factory=dict)

    @property
    def last_step(self) -> int | None:
        """The last step that it finished, as far as is known."""
        return self.steps[-1]["step"] if self.steps else self.from_step

    @property
    def has_ended(self) -> bool:
        """Whether it said how it ended."""
        return self.exit_code is not None

    def saw(self, record: Record) -> None:
        """Take a record's time as a sign of life."""
        at = when(record)
        if at is not None:
            began, last_seen = self.span or (at, at)
            self.span = min(began, at), max(last_seen, at)


def attempts_of(records: Records) -> list[Attempt]:
    """Return the attempts of a run, in the order in which they began."""
    by_start: dict[str, Attempt] = {}
    for record in records.attempts:
        attempt = by_start.setdefault(record["start_id"], Attempt())
        attempt.saw(record)
        if record["event"] == "bring_up":
            attempt.details = record
        attempt.number = _integer(record.get("attempt"), attempt.number)
        attempt.from_step = _integer(record.get("from_step"), attempt.from_step)
        if record["event"] == "end":
            attempt.exit_code = _integer(record.get("exit_code"), None)
            attempt.cause = str(record.get("cause"))
    by_number: dict[Any, Attempt] = {attempt.number: attempt for attempt in by_start.values()}
    by_number.pop(None, None)
    for record in records.metrics:
        if (owner := by_number.get(record.get("attempt"))) is not None:
            owner.saw(record)
            owner.steps.append(record)
    for record in records.events:
        if (owner := by_number.get(record.get("attempt"))) is not None:
            owner.saw(record)
            owner.events.append(record)
    return list(by_start.values())


def kept_steps(attempts: Sequence[Attempt]) -> list[Record]:
    """Return the steps that the run's state descends from, one record each, by step."""
    kept: list[Record] = []
    for attempt in attempts:
        if attempt.from_step is not None:
            del kept[bisect.bisect_right(kept, attempt.from_step, key=_step_of) :]
        kept.extend(_ascending(attempt.steps, after=_step_of(kept[-1]) if kept else 0))
    return kept


def _ascending(steps: Iterable[Record], after: int) -> Iterable[Record]:
    """Leave out what a damaged file has twice or out of order."""
    for record in steps:
        if record["step"] > after:
            after = record["step"]
            yield record


def _step_of(record: Record) -> int:
    return int(record["step"])


def _integer(value: Any, otherwise: int | None) -> int | None:
    return value if type(value) is int else otherwise
