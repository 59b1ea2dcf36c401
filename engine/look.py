"""What was in a batch: the samples of a step, found from a checkpoint's manifest alone.

A launcher's manifest holds the order of all samples and what the data sets were made from, so the
place of any sample of the run, past or to come, is computed in O(1), and its text is read if the
data are still there and still the same. torch is imported only by data sets that need it.

A checkpoint of another loop, given a stream's fingerprint, has the order too; then there are places
without text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.format.manifest import Draft
from engine.inspect import InspectError
from engine.look_data import RunData, decoder
from engine.stream import Order, Place, StreamError


@dataclass(frozen=True)
class Seen:
    """One sample of a batch.

    sample_offset  its number among the samples that are used
    global_index   its number in the order, which is what data.skip takes
    place          component, epoch and index
    details        files, documents and windows, one a line
    text           what it says, where that is known
    """

    sample_offset: int
    global_index: int
    place: Place
    details: tuple[str, ...] = ()
    text: str | None = None


@dataclass
class Batch:
    """The samples of one step, or one sample.

    samples  in order, those whose data are missing without details
    errors   one for each component whose data are gone or changed, or sample that cannot be read
    notes    what to know before believing it
    """

    samples: list[Seen] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def offsets_of_step(manifest: Draft, step: int) -> range:
    """Return the sample offsets of the global batch that made a step.

    Raises:
        InspectError: the step is below 1, or the manifest does not say how large a batch is.
    """
    if step < 1:
        raise InspectError(f"--step {step}: the first step is 1")
    try:
        size = int(_mapping(manifest.fingerprint)["fixed"]["batch.global_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise InspectError(
            f"{manifest.tag} was not saved by the launcher and does not say how large a global "
            "batch is; name the samples instead: --sample"
        ) from error
    return range((step - 1) * size, step * size)


def look(manifest: Draft, offsets: range, tokenizer: str | None = None) -> Batch:
    """Return what the samples at some offsets are.

    Args:
        tokenizer: a tokenizers JSON file that decodes tokens which no data set can.

    Raises:
        InspectError: the manifest does not hold an order, or it ends before them.
    """
    identity = _mapping(manifest.fingerprint)
    by_launcher = "data" in identity
    stored = _mapping(identity["data"]) if by_launcher else identity
    settings = _mapping(identity.get("components")) if by_launcher else {}
    try:
        order = Order.from_json(stored)
    except StreamError as error:
        raise InspectError(f"{manifest.tag}: {error}") from error
    data = RunData(stored, settings, decoder(tokenizer))
    batch = Batch(notes=_notes(manifest, offsets))
    for offset in offsets:
        try:
            _, place = order.look_up(offset)
        except IndexError as error:
            raise InspectError(str(error)) from error
        details, text = data.read(order.seed, place)
        batch.samples.append(
            Seen(offset, order.skips.global_index(offset), place, tuple(details), text)
        )
    batch.errors = data.errors
    return batch


def _notes(manifest: Draft, offsets: range) -> list[str]:
    notes = []
    for change in _mapping(manifest.stream).get("accepted_changes", []):
        at = change["sample_offset"]
        if offsets.start < at:
            notes.append(
                f"the data were changed at sample offset {at}, and what follows is by those of "
                "after the change; for what was before, look with --tag at a checkpoint of before"
            )
    if offsets.stop > manifest.sample_offset:
        notes.append(
            f"{manifest.tag} had used {manifest.sample_offset} samples; those from there on are "
            "what it would go on with"
        )
    return notes


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
