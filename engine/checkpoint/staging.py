"""Copy a rank's live state into an image: one memory copy per save, and no other work that grows.

Owns the images and the plan of the shard that they hold. Runs on the training thread, between two
steps; what can fail (encoding, planning, memory) comes before the first byte of an image is
touched. The images are made ahead, for the larger of the present state and the one that the
optimizer is known to make, and prefaulted in the background.
"""

import logging
from collections.abc import Sequence

import torch

from engine.checkpoint.copier import Copier
from engine.checkpoint.handover import IMAGES
from engine.checkpoint.image import Image, Prefault
from engine.checkpoint.plan import StagingPlan, Structure
from engine.checkpoint.zero3 import Layout

logger = logging.getLogger(__name__)

_PLANS = 2  # of the present state, and of the one that the first step will make


class StagingArea:
    """The images of one rank, and the plan of the shard that they hold."""

    def __init__(self, layout: Layout, copier: Copier) -> None:
        self._layout = layout
        self._copier = copier
        self._images: list[Image] = []
        self._prefault: Prefault | None = None
        self._plans: list[StagingPlan] = []

    @property
    def size_bytes(self) -> int:
        """Bytes that an image holds at most."""
        return self._images[0].size_bytes if self._images else 0

    def plan(self, structure: Structure) -> StagingPlan:
        """Return the plan for `structure`: the same object as before, if it is a recent one."""
        for plan in self._plans:
            if plan.structure == structure:
                return plan
        plan = StagingPlan(self._layout, structure)
        logger.info(
            "planned a shard of %d entries in %d copies, %d bytes",
            len(plan.shard.entries),
            len(plan.runs),
            plan.shard.size_bytes,
        )
        self._plans = [plan, *self._plans][:_PLANS]
        return plan

    def reserve(self, size_bytes: int) -> None:
        """Have images of `size_bytes` at least. New ones take the place of smaller ones.

        The old ones must be free then. Their pages are taken in the background.
        """
        if size_bytes <= self.size_bytes:
            return
        images = [Image(size_bytes) for _ in range(IMAGES)]
        self.close()
        self._images = images
        self._prefault = Prefault(images, self._copier.pin)

    def wait_until_warm(self) -> None:
        """Return when the images are prefaulted."""
        if self._prefault is not None:
            self._prefault.wait()

    def stage(
        self, index: int, plan: StagingPlan, header: bytes, tensors: Sequence[torch.Tensor]
    ) -> Image:
        """Fill image number `index`: `header`, and then `tensors`, the plan's, by `plan.runs`.

        The image is whole, and nothing in it aliases live state, when the copier has finished.
        """
        image = self._images[index]
        image.write(0, header)
        self._copier.issue(image, tensors, plan.runs, plan.first_whole)
        return image

    def close(self) -> None:
        """Let the images go; the writer keeps those it still holds."""
        if self._prefault is not None:
            self._prefault.stop()
        for image in self._images:
            self._copier.unpin(image)
            image.close()
        self._images, self._prefault = [], None
