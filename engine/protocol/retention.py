"""Which committed tags may go, and their removal. Run by rank 0's writer, after a commit.

Only tags of the run's own history are considered, a tag goes only after a newer one has committed,
and a failure here is reported, never raised into the save that has just succeeded.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.format import names, tree
from engine.format.errors import FormatError
from engine.format.manifest import Manifest
from engine.protocol import files, history
from engine.protocol.commit import is_fenced, read_manifest
from engine.protocol.files import Renamed
from engine.protocol.history import Link
from engine.protocol.layout import MANIFEST, CheckpointDirectory

_MODES = ("min", "max")


@dataclass(frozen=True)
class KeepBest:
    """Keep the `count` tags whose `metric` is smallest (`mode` "min") or largest ("max")."""

    metric: str
    mode: str = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if not self.metric:
            raise ValueError("keep_best.metric is empty; name one of the metrics that save() gets")
        if self.mode not in _MODES:
            raise ValueError(f"keep_best.mode is {self.mode!r}, wanted min or max")
        if self.count < 1:
            raise ValueError(f"keep_best.count is {self.count}, wanted 1 or more")


@dataclass(frozen=True)
class Retention:
    """What is kept of the own history; a tag stays if any of the three wants it.

    keep_last         so many of the newest
    keep_every_steps  tags whose step is a multiple of it, for ever
    keep_best         the best of a metric; a tag without it, or with a NaN, is never among them
    """

    keep_last: int
    keep_every_steps: int | None = None
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, wanted 1 or more")


@dataclass(frozen=True)
class Committed:
    """What retention needs to know of a committed tag."""

    tag: str
    step: int
    attempt: int
    save_id: str
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, manifest: Manifest) -> "Committed":
        """Take it from the tag's manifest."""
        metrics = _metrics(manifest)
        return cls(manifest.tag, manifest.step, manifest.attempt, manifest.save_id, metrics)


def expired(
    tags: Iterable[Committed], line: Sequence[Link], retention: Retention
) -> list[Committed]:
    """Return the tags on history `line` that `retention` does not keep, newest first. Pure.

    The tag an attempt resumed from is on its line, so it goes only when `keep_last` newer ones
    have committed.
    """
    own = [tag for tag in tags if history.covers(line, tag.attempt, tag.step)]
    own.sort(key=lambda tag: -tag.step)
    kept = {tag.step for tag in own[: retention.keep_last]}
    if retention.keep_every_steps is not None:
        kept |= {tag.step for tag in own if tag.step % retention.keep_every_steps == 0}
    if retention.keep_best is not None:
        kept |= _best_steps(own, retention.keep_best)
    return [tag for tag in own if tag.step not in kept]


def _metrics(manifest: Manifest) -> dict[str, float]:
    """Return the numbers among what the save was given as metrics."""
    state = manifest.state if isinstance(manifest.state, dict) else {}
    metrics = tree.decode(state.get("metrics", {}))
    pairs = metrics.items() if isinstance(metrics, dict) else ()
    return {name: float(value) for name, value in pairs if type(value) in (int, float)}


def _best_steps(newest_first: Sequence[Committed], best: KeepBest) -> set[int]:
    """Return the steps of the best tags; of equal ones, the newer are the better."""
    values = [(tag.metrics.get(best.metric, math.nan), tag.step) for tag in newest_first]
    ranked = [(value, step) for value, step in values if not math.isnan(value)]
    ranked.sort(key=lambda pair: pair[0] if best.mode == "min" else -pair[0])
    return {step for _, step in ranked[: best.count]}


def prune(
    directory: CheckpointDirectory,
    me: int,
    line: Sequence[Link],
    retention: Retention,
    known: dict[str, Committed] | None = None,
) -> list[str]:
    """Remove the expired tags of attempt `me`'s history; return their names. Blocking.

    `known` holds, by tag, what calls before this one have found out, and is brought up to date:
    years of kept tags are not read again at every commit. Who commits a tag takes it out.
    """
    known = {} if known is None else known
    _look(directory, known)
    pruned: list[str] = []
    for committed in expired(known.values(), line, retention):
        if is_fenced(directory, me):
            return pruned
        trash = os.path.join(directory.attempt(me).trash, f"{committed.tag}.{committed.save_id}")
        if files.rename_new(directory.tag(committed.tag), trash) is not Renamed.DONE:
            continue
        if is_fenced(directory, me):
            return pruned  # a newer attempt finds it whole in the closed trash, and puts it back
        files.remove_tree(trash, first=MANIFEST)
        pruned.append(committed.tag)
    return pruned


def _look(directory: CheckpointDirectory, known: dict[str, Committed]) -> None:
    """Read the manifests of tags that are not known yet; forget those that have gone."""
    present = {n for n in files.fresh_listing(directory.root) if names.step_of(n) is not None}
    for gone in known.keys() - present:
        del known[gone]
    for name in present - known.keys():
        try:
            manifest = read_manifest(directory.tag(name))
        except FormatError:
            continue  # damaged: for people to look at, not ours to delete
        if manifest is not None and manifest.tag == name:
            known[name] = Committed.of(manifest)


def empty_trash(directory: CheckpointDirectory, me: int) -> None:
    """Delete what lies in attempt `me`'s trash. Blocking."""
    trash = directory.attempt(me).trash
    for name in files.listing(trash):
        files.remove_tree(os.path.join(trash, name), first=MANIFEST)
