"""Copy a rank's live state into an image: planned once, one memory copy per save.

Runs on the training thread, between two steps. What can fail (encoding, planning, memory) comes
before the first byte of the image is touched.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.checkpoint.handover import IMAGES
from engine.checkpoint.image import Image
from engine.checkpoint.zero3 import Source
from engine.format.shard import Entry, ShardPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Run:
    """Bytes that lie together both in a live tensor and in the image: one copy."""

    tensor: torch.Tensor
    begin: int
    end: int
    target: int


class StagingArea:
    """The images of one rank, and the plan of the shard that they hold."""

    def __init__(self) -> None:
        self._images: list[Image] = []
        self._plan: ShardPlan | None = None

    def plan(self, entries: Sequence[Entry]) -> ShardPlan:
        """Return the plan for `entries`, made anew only when they have changed.

        The images must be free when it changes: they are made anew with it.
        """
        if self._plan is None or self._plan.entries != tuple(entries):
            plan = ShardPlan(entries)
            images = [Image(plan.size_bytes) for _ in range(IMAGES)]
            self.close()
            self._plan, self._images = plan, images
            logger.info(
                "planned a shard of %d entries, %d bytes; %d images",
                len(plan.entries),
                plan.size_bytes,
                IMAGES,
            )
        return self._plan

    def needs_new_plan(self, entries: Sequence[Entry]) -> bool:
        """Tell whether `plan` would make new images."""
        return self._plan is None or self._plan.entries != tuple(entries)

    def stage(self, index: int, header: bytes, sources: Mapping[str, Source]) -> Image:
        """Copy every source to its place in image number `index`; return the image.

        `sources` holds one source per entry of the plan. Returns when the copy is complete:
        nothing in the image aliases live state.
        """
        assert self._plan is not None, "plan() comes first"
        image = self._images[index]
        image.write(0, header)
        for run in _runs(self._plan, sources):
            count = run.end - run.begin
            live = run.tensor.reshape(-1).view(torch.uint8)[run.begin : run.end]
            image.bytes[run.target : run.target + count].copy_(live)
        return image

    def close(self) -> None:
        """Let the images go; the writer keeps those it still holds."""
        for image in self._images:
            image.close()
        self._images, self._plan = [], None


def _runs(plan: ShardPlan, sources: Mapping[str, Source]) -> Iterator[_Run]:
    """Join neighbours: a flat group without padding is one copy, however many slices it has."""
    run: _Run | None = None
    for entry in plan.entries:
        source = sources[entry.name]
        size = source.tensor.element_size()
        begin, end = source.begin * size, (source.begin + source.valid) * size
        target, stop = plan.spans[entry.name]
        assert stop - target == end - begin, f"{entry.name}: the plan is of another state"
        if run is not None and run.tensor is source.tensor and run.end == begin:
            run = _Run(run.tensor, run.begin, end, run.target)
        else:
            if run is not None and run.end > run.begin:
                yield run
            run = _Run(source.tensor, begin, end, target)
    if run is not None and run.end > run.begin:
        yield run
