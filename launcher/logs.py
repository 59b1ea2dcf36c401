"""Where log records go: warnings to the terminal, everything of ours to a file per rank.

The terminal belongs to the progress bar, so records are written around it.
"""

import logging
import sys
import warnings
from pathlib import Path

from tqdm import tqdm

_OURS = ("launcher", "engine")


class _AroundTheBar(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _is_not_about_the_cpu(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()


def configure(rank: int) -> None:
    """Send warnings to standard error, with the rank in front. Call once."""
    handler = _AroundTheBar(logging.WARNING)
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    # DeepSpeed 0.19.8 says on every rank that it found no accelerator, and calls collectives by
    # names that torch 2.13 deprecates: nothing that a user of either could change.
    logging.getLogger("DeepSpeed").addFilter(_is_not_about_the_cpu)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")


def write_to(path: Path) -> None:
    """Append every record, ours from INFO on, to a file as well; to no other one any more."""
    root = logging.getLogger()
    for before in [one for one in root.handlers if isinstance(one, logging.FileHandler)]:
        root.removeHandler(before)
        before.close()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
