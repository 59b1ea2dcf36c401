"""How live tensors get into an image: at once, or on a side stream while training goes on.

`DirectCopier` copies before it returns. `StreamCopier` issues the copies on a side stream of the
accelerator; until `finish` has returned, nothing may change the tensors, and the image is not
whole. Both run on the training thread.

    issue     the copies begin after everything that was issued before, the last step included
    finish    they are complete; called before the parameters change, and before the image is sealed

No GPU has run `CudaStreams` yet; the order of the calls is tested on the CPU with streams that copy
as late as they may.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.checkpoint.image import Image
from engine.checkpoint.plan import Run

# A copy by torch costs some microseconds, ten times as much as one by numpy, but may use several
# threads: worth it from here on.
_LARGE_BYTES = 1 << 20


class Copier(Protocol):
    """Copies a rank's live tensors into an image."""

    overlaps: bool
    """Whether `issue` may return before the copies are complete."""

    def pin(self, image: Image) -> None:
        """Make an image fit for fast copies. Called once for each, on any thread."""

    def unpin(self, image: Image) -> None:
        """Undo `pin`, before the image's memory goes. Does nothing where it was not pinned."""

    def issue(
        self, image: Image, tensors: Sequence[torch.Tensor], runs: Sequence[Run], first_whole: int
    ) -> None:
        """Begin to copy. `tensors` from number `first_whole` on are copied on return, always.

        Those are buffers and RNG states, which may change at any time; the others change only when
        the optimizer steps. All are 1-D, contiguous, and kept until `finish`.
        """

    def finish(self) -> None:
        """Return when everything that was issued is in its image."""


class DirectCopier:
    """Copies at once. Where the state is in main memory there is nothing to overlap with."""

    overlaps = False

    def pin(self, image: Image) -> None:
        """Do nothing."""

    def unpin(self, image: Image) -> None:
        """Do nothing."""

    def issue(
        self, image: Image, tensors: Sequence[torch.Tensor], runs: Sequence[Run], first_whole: int
    ) -> None:
        """Copy everything; returns when it is in the image."""
        sources = [_bytes_of(tensor) for tensor in tensors]
        arrays = [source.numpy() if source.is_cpu else None for source in sources]
        target = image.bytes.numpy()
        for run in runs:
            size, array = run.end - run.begin, arrays[run.source]
            if size >= _LARGE_BYTES or array is None:
                live = sources[run.source][run.begin : run.end]
                image.bytes[run.target : run.target + size].copy_(live)
            else:
                target[run.target : run.target + size] = array[run.begin : run.end]

    def finish(self) -> None:
        """Do nothing: `issue` has copied."""


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Return when the stream has passed it."""


class Streams(Protocol):
    """What `StreamCopier` needs of an accelerator."""

    def pin(self, image: Image) -> None:
        """See `Copier.pin`."""

    def unpin(self, image: Image) -> None:
        """See `Copier.unpin`."""

    def begin(self) -> None:
        """Let the side stream wait for all that was issued on the current one."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy on the side stream."""

    def record(self) -> Event:
        """Return the point in the side stream behind all that was issued on it."""


class StreamCopier:
    """Copies on a side stream, so that the next forward and backward pass hide it."""

    overlaps = True

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._event: Event | None = None
        self._kept: list[torch.Tensor] = []
        self.pin = streams.pin
        self.unpin = streams.unpin

    def issue(
        self, image: Image, tensors: Sequence[torch.Tensor], runs: Sequence[Run], first_whole: int
    ) -> None:
        """Issue the copies behind all that the current stream has been given; see `Copier.issue`.

        Nothing waits for those on the side stream; the others are blocking copies.
        """
        sources = [_bytes_of(tensor) for tensor in tensors]
        self._streams.begin()
        for run in runs:
            source = sources[run.source][run.begin : run.end]
            target = image.bytes[run.target : run.target + run.end - run.begin]
            if run.source < first_whole:
                self._streams.copy(target, source)
            else:
                target.copy_(source)
        self._kept = sources
        self._event = self._streams.record()

    def finish(self) -> None:
        """Wait for the side stream, and let go of the tensors."""
        if self._event is not None:
            self._event.synchronize()
            self._event, self._kept = None, []


class CudaStreams:
    """CUDA's side of `StreamCopier`. No GPU has run it yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = torch.cuda.Stream(device)
        self._pinned: set[int] = set()

    def pin(self, image: Image) -> None:
        """Register the mapping: copies to pageable memory would not be asynchronous."""
        with torch.cuda.device(self._device):
            status = int(
                torch.cuda.cudart().cudaHostRegister(image.bytes.data_ptr(), image.size_bytes, 0)
            )
        if status != 0:
            raise OSError(f"cudaHostRegister of {image.size_bytes} bytes gave error {status}")
        self._pinned.add(image.descriptor)

    def unpin(self, image: Image) -> None:
        """Take the mapping out of CUDA's register, if `pin` has put it there."""
        if image.descriptor in self._pinned:
            self._pinned.remove(image.descriptor)
            torch.cuda.cudart().cudaHostUnregister(image.bytes.data_ptr())

    def begin(self) -> None:
        """See `Streams.begin`: the GPU waits, and not the host."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy from GPU memory to pinned host memory; does not block."""
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        """See `Streams.record`."""
        event: Event = self._side.record_event()
        return event


def copier_for(device: torch.device) -> Copier:
    """Return the copier for state that lives on `device`."""
    if device.type == "cuda":
        return StreamCopier(CudaStreams(device))
    return DirectCopier()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
