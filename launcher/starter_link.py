"""What a starter and ranks on other hosts tell each other: files in a directory that all see.

`deepspeed` and `srun` start ranks for us, but carry neither a stop to them nor a verdict back that
could be trusted: SIGTERM makes srun kill its tasks, and makes DeepSpeed's runner `pkill -f` on
every host. So `launch=deepspeed` and `launch=srun` make a directory in the run's:

    stop               the starter asks the ranks to save and stop; holds why
    alive              changed every few seconds while the starter lives
    meeting            where rank 0 listens (`launcher.meeting`)
    status             rank 0's verdict, as in EVERSTEP_STATUS_FILE (`launcher.requeue`)
    rank_00003.json    when and of what a rank failed

Who runs what: `StarterSide` belongs to the starter's main thread, `RankSide` to rank 0's training
thread, which looks at most once a second. Neither raises for the disk while the run goes on.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import TracebackType

from launcher import requeue

DIRECTORY = ".starters"
BEAT_SECONDS = 10.0
LOST_SECONDS = 120.0
"""A starter that shows no sign of life for so long is gone."""

_LOOK_EVERY_SECONDS = 1.0

logger = logging.getLogger(__name__)


class StarterSide:
    """One start of the ranks, seen from their starter. A context manager: the files go at its end.

    Args:
        run_directory: on a file system that every rank sees.
        launch_id: names the start.
    """

    def __init__(self, run_directory: Path, launch_id: str) -> None:
        self.path = run_directory / DIRECTORY / launch_id
        self._beats = 0

    def __enter__(self) -> "StarterSide":
        self.path.mkdir(parents=True)
        self.beat()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def beat(self) -> None:
        """Show that the starter lives."""
        self._beats += 1
        self._write("alive", str(self._beats))

    def ask_to_stop(self, cause: str) -> None:
        """Have the ranks save and stop."""
        self._write("stop", cause)

    def status(self) -> str:
        """Return rank 0's word: `started`, a verdict, or nothing if the ranks never met."""
        os.listdir(self.path)  # a network client may remember that the name was not there
        try:
            return (self.path / "status").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return ""

    def failures(self) -> list[tuple[int, str]]:
        """Return (rank, what it said) of those that failed, the first failure last."""
        found = []
        for path in self.path.glob("rank_*.json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            found.append((content["time"], int(path.stem.partition("_")[2]), content["text"]))
        return [(rank, text) for _, rank, text in sorted(found, reverse=True)]

    def _write(self, name: str, text: str) -> None:
        part = self.path / f"{name}.part"
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(self.path / name)
        except OSError as error:
            logger.warning("cannot tell the ranks (%s): %s", name, error)


class RankSide:
    """The same, seen from rank 0."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked_at = self._changed_at = clock()
        self._beat = ""

    def look(self) -> str | None:
        """Return why to stop, if there is a reason."""
        now = self._clock()
        if now - self._looked_at < _LOOK_EVERY_SECONDS:
            return None
        self._looked_at = now
        try:
            # A listing: network clients remember for long that a single name was not there.
            if "stop" in os.listdir(self._path):
                return (self._path / "stop").read_text(encoding="utf-8")
            beat = (self._path / "alive").read_text(encoding="utf-8")
        except OSError:
            beat = self._beat  # no sign of life either
        if beat != self._beat:
            self._beat, self._changed_at = beat, now
        if now - self._changed_at >= LOST_SECONDS:
            return "the starter is gone"
        return None


def take_over(environ: MutableMapping[str, str], rank: int) -> Path | None:
    """In a rank: report where the starter looks, if it is one that looks; return the directory."""
    name = environ.get("EVERSTEP_LINK")
    if not name:
        return None
    path = Path(name)
    environ[requeue.STATUS_FILE] = str(path / "status")
    environ["EVERSTEP_ERROR_FILE"] = str(path / f"rank_{rank:05d}.json")
    return path
