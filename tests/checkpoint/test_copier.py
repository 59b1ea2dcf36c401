"""The order of copies on a side stream, without an accelerator."""

import torch

from engine.checkpoint.copier import DirectCopier, StreamCopier, copier_for
from engine.checkpoint.image import Image
from engine.checkpoint.plan import Run
from tests.checkpoint.late_streams import LateStreams

SLICE, BUFFER = 0, 1
RUNS = (Run(SLICE, 4, 12, 0), Run(BUFFER, 0, 3, 100))


def test_copies_are_issued_after_the_step_and_complete_when_finished() -> None:
    streams = LateStreams()
    copier, image = StreamCopier(streams), Image(4096)
    master = torch.arange(4, dtype=torch.float32)
    buffer = torch.tensor([1, 2, 3], dtype=torch.uint8)
    copier.issue(image, [master, buffer], RUNS, first_whole=BUFFER)
    assert streams.log == ["begin", "record"]
    assert image.bytes[100:103].tolist() == [1, 2, 3], "buffers may change before the next step"
    buffer.zero_()
    assert not image.bytes[:8].any(), "the stream is to be late"
    copier.finish()
    assert image.bytes[:8].view(torch.float32).tolist() == [1, 2]
    assert image.bytes[100:103].tolist() == [1, 2, 3]
    copier.finish()
    assert streams.log == ["begin", "record", "synchronize"], "there was nothing to wait for"
    image.close()


def test_a_direct_copy_is_complete_at_once() -> None:
    copier, image = copier_for(torch.device("cpu")), Image(8 << 20)
    assert isinstance(copier, DirectCopier)
    assert not copier.overlaps
    large = torch.arange(1 << 20, dtype=torch.float32)
    small = torch.tensor([True, False, True])
    runs = (Run(0, 4, 4 << 20, 0), Run(1, 1, 3, 4 << 20))
    copier.issue(image, [large, small], runs, first_whole=2)
    assert torch.equal(image.bytes[: (4 << 20) - 4].view(torch.float32), large[1:])
    assert image.bytes[4 << 20 : (4 << 20) + 3].tolist() == [0, 1, 0]
    image.close()
