"""Where log records go: warnings to the terminal, everything of ours to a file per rank.

The terminal belongs to the progress bar, so records are written around it.
"""

import logging
import sys
import warnings
from pathlib import Path

from tqdm import tqdm

_OURS = ("launcher", "engine")


_CLEAR_LINE = "\r\x1b[K"


class _AroundTheBar(logging.Handler):
    """Writes around the bar of this process, and over that of rank 0's, which it draws again."""

    def __init__(self, over_another: bool) -> None:
        super().__init__(logging.WARNING)
        self._before = _CLEAR_LINE if over_another else ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self._before + self.format(record), file=sys.stderr)
        except OSError:
            pass  # a terminal that has gone must not end a run; the log file has the record


def _is_not_about_the_cpu(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()


def configure(rank: int, *, on_terminal: bool) -> None:
    """Send warnings to standard error, with the rank in front. Call once.

    Args:
        on_terminal: whether that is a terminal with a bar; rank 0 draws it.
    """
    root = logging.getLogger()
    root.handlers = [handler_of(rank, on_terminal=on_terminal)]
    root.setLevel(logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    # DeepSpeed 0.19.8 says on every rank that it found no accelerator, and calls collectives by
    # names that torch 2.13 deprecates: nothing that a user of either could change.
    logging.getLogger("DeepSpeed").addFilter(_is_not_about_the_cpu)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")


def handler_of(rank: int, *, on_terminal: bool) -> logging.Handler:
    """Return what writes a rank's warnings; see `configure`."""
    handler = _AroundTheBar(over_another=on_terminal and rank != 0)
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s %(name)s: %(message)s"))
    return handler


def write_to(path: Path) -> None:
    """Append every record, ours from INFO on, to a file as well; to no other one any more."""
    root = logging.getLogger()
    for before in [one for one in root.handlers if isinstance(one, logging.FileHandler)]:
        root.removeHandler(before)
        before.close()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
