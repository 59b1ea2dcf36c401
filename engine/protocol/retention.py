"""Which committed tags may go, and their removal. Run by rank 0's writer, after a commit.

Only tags of the run's own history are considered, a tag goes only after a newer one has committed,
and a failure here is reported, never raised into the save that has just succeeded.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from engine.format import tree
from engine.format.manifest import Manifest
from engine.protocol import files, history, takeover
from engine.protocol.commit import is_fenced
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


def expired(
    manifests: Sequence[Manifest], line: Sequence[Link], retention: Retention
) -> list[Manifest]:
    """Return the tags on history `line` that `retention` does not keep, newest first. Pure.

    The tag an attempt resumed from is on its line, so it goes only when `keep_last` newer ones
    have committed.
    """
    own = [m for m in manifests if history.covers(line, m.attempt, m.step)]
    own.sort(key=lambda manifest: -manifest.step)
    kept = {manifest.step for manifest in own[: retention.keep_last]}
    if retention.keep_every_steps is not None:
        kept |= {m.step for m in own if m.step % retention.keep_every_steps == 0}
    if retention.keep_best is not None:
        kept |= _best_steps(own, retention.keep_best)
    return [manifest for manifest in own if manifest.step not in kept]


def metric_of(manifest: Manifest, name: str) -> float | None:
    """Return a metric that was given to the save, None where there is none of that name."""
    state = manifest.state if isinstance(manifest.state, dict) else {}
    metrics = state.get("metrics")
    value = tree.decode(metrics[name]) if isinstance(metrics, dict) and name in metrics else None
    return float(value) if isinstance(value, (int, float)) else None


def _best_steps(newest_first: Sequence[Manifest], best: KeepBest) -> set[int]:
    """Return the steps of the best tags; of equal ones, the newer are the better."""
    values = [(metric_of(manifest, best.metric), manifest.step) for manifest in newest_first]
    ranked = [
        (value, step) for value, step in values if value is not None and not math.isnan(value)
    ]
    ranked.sort(key=lambda pair: pair[0] if best.mode == "min" else -pair[0])
    return {step for _, step in ranked[: best.count]}


def prune(
    directory: CheckpointDirectory, me: int, line: Sequence[Link], retention: Retention
) -> list[str]:
    """Remove the expired tags of attempt `me`'s history; return their names. Blocking."""
    manifests, _ = takeover.committed(directory)
    pruned: list[str] = []
    for manifest in expired(manifests, line, retention):
        if is_fenced(directory, me):
            return pruned
        trash = os.path.join(directory.attempt(me).trash, f"{manifest.tag}.{manifest.save_id}")
        if files.rename_new(directory.tag(manifest.tag), trash) is not Renamed.DONE:
            continue
        if is_fenced(directory, me):
            return pruned  # a newer attempt finds it whole in the closed trash, and puts it back
        files.remove_tree(trash, first=MANIFEST)
        pruned.append(manifest.tag)
    return pruned


def empty_trash(directory: CheckpointDirectory, me: int) -> None:
    """Delete what lies in attempt `me`'s trash. Blocking."""
    trash = directory.attempt(me).trash
    for name in files.listing(trash):
        files.remove_tree(os.path.join(trash, name), first=MANIFEST)
