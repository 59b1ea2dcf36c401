"""The trainer's end of its writer: start it, hand over images, take in its reports, replace it.

One link per rank, used by the training thread only; nothing here blocks but `start` and `wait`, and
nothing is collective. A dead writer is replaced by sending every unsettled seal again to a new one:
seals are idempotent.
"""

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from engine.checkpoint.under_way import UnderWay
from engine.checkpoint.writer import WriterConfig
from engine.protocol.layout import CheckpointDirectory

logger = logging.getLogger(__name__)

_MESSAGE_BYTES = 64 << 10
_START_SECONDS = 60.0
_SEND_SECONDS = 10.0
_KILL_SECONDS = 10.0
_LOOKS_IN_SILENCE = 4
_PACKAGES = str(Path(__file__).resolve().parents[2])
_XXHASH = str(Path(xxhash.__file__).resolve().parents[1])
# -I -S: nothing of the user's environment, and no site-packages start-up code, runs in the writer.
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[2]); sys.path.append(sys.argv[3]); "
    "from engine.checkpoint.writer import main; main(int(sys.argv[1]))"
)


class WriterStartError(Exception):
    """A writer process could not be started."""


@dataclass(frozen=True)
class Seal:
    """What the writer is told of a fully staged image.

    `save` is the save's directory name, `data_offset` where the shard's data start, `draft` the
    manifest's draft as JSON bytes on rank 0, and None elsewhere. `sealed_at` is when it was staged
    on the host's monotonic clock, which all processes share: commits are timed from it. `digest` is
    that of the rank's file in the local tier, for a save that an earlier attempt left there, and
    None for all others. `weights` is where the masters lie (`format.layout.weight_spans`);
    None leaves their digest out of the receipt.
    """

    save: str
    save_id: str
    size_bytes: int
    data_offset: int
    draft: bytes | None
    sealed_at: float = field(default_factory=time.monotonic)
    digest: str | None = None
    weights: tuple[tuple[int, int], ...] | None = None


class WriterLink:
    """A running writer and the socket to it."""

    def __init__(
        self,
        config: WriterConfig,
        keeper_fd: int | None = None,
        command: Callable[[int], list[str]] | None = None,
    ) -> None:
        """Remember how to start the writer.

        `keeper_fd` is a pipe end that the writer inherits and never touches: the keeper at the
        other end sees by it when the last writer is gone. It is told, by the line `gone PATH`,
        which sign to leave then; a writer that was killed leaves none itself. `command` is the
        command line for a given socket descriptor.
        """
        self._config = config
        self._keeper_fd = keeper_fd
        self._command = command or _command
        self._socket: socket.socket | None = None
        self._pidfd: int | None = None
        self._looked_at = 0.0
        self._silent_seconds = 0.0
        self.under_way: tuple[UnderWay, ...] = ()
        """What the writer was at when it last said that it is alive."""
        self.pid: int | None = None
        # Data workers forked later must not hold the socket open or speak through it.
        os.register_at_fork(after_in_child=self._drop)

    @property
    def alive(self) -> bool:
        """Whether a writer is at the other end, as far as is known."""
        return self._socket is not None

    @property
    def silent(self) -> bool:
        """Whether the writer runs as far as is known, and has said nothing for too long."""
        return self.alive and self._silent_seconds >= self._config.silence_seconds

    def start(self) -> None:
        """Start the writer and wait until it says that it is up. Raises WriterStartError."""
        self._tell_keeper()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = [theirs.fileno()] + ([] if self._keeper_fd is None else [self._keeper_fd])
        process = subprocess.Popen(
            self._command(theirs.fileno()),
            pass_fds=kept,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        pidfd = os.pidfd_open(os.getpid())
        try:
            socket.send_fds(ours, [json.dumps(asdict(self._config)).encode()], [pidfd])
            process.wait()  # it has forked; its child, the writer, is nobody's to wait for
            ours.settimeout(_START_SECONDS)
            up = ours.recv(_MESSAGE_BYTES)
            if up:
                self.pid = int(json.loads(up)["pid"])
                self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            up, reason = b"", str(error)
        else:
            reason = "it ended at once"
        finally:
            os.close(pidfd)
        if not up:
            ours.close()
            raise WriterStartError(
                f"the writer did not start: {reason}. Its log is {self._config.log}"
            )
        ours.setblocking(False)
        self._socket, self.under_way = ours, ()
        self._looked_at, self._silent_seconds = time.monotonic(), 0.0

    def seal(self, seal: Seal, image: int | None, again: bool = False) -> bool:
        """Hand a staged image over: with this, the save is fully staged.

        The image (a descriptor, duplicated here) must not change until it is persisted. Returns
        False if the writer is dead; then its successor is to get the seal `again`, and None for an
        image that has been persisted: by then it may hold another save.
        """
        message = {
            "kind": "seal",
            "save": seal.save,
            "save_id": seal.save_id,
            "size_bytes": seal.size_bytes,
            "data_offset": seal.data_offset,
            "weights": seal.weights,
            "sealed_at": seal.sealed_at,
            "digest": seal.digest,
            "has_image": image is not None,
            "again": again,
        }
        descriptors = [] if image is None else [image]
        if seal.draft is None:
            return self._send(message, descriptors)
        draft = os.memfd_create("everstep-draft", os.MFD_CLOEXEC)
        try:
            os.write(draft, seal.draft)
            return self._send(message, [*descriptors, draft])
        finally:
            os.close(draft)

    def reports(self) -> Iterator[dict[str, Any]]:
        """Yield what the writer has reported, without waiting. `alive` is False after its end."""
        heard = False
        while self._socket is not None:
            try:
                data = self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                self._count_silence(heard)
                return
            except ConnectionResetError:
                # The writer died with seals unread. Linux says so once, ahead of what it had sent.
                continue
            if not data:
                self._drop()
                return
            heard = True
            report = json.loads(data)
            if report["kind"] == "alive":
                self.under_way = tuple(UnderWay(**one) for one in report["under_way"])
            else:
                yield report

    def _count_silence(self, heard: bool) -> None:
        """Add up how long nothing was heard.

        A look adds at most a quarter of the limit: a trainer that was stopped itself, together with
        its writer perhaps, looks a few times before it draws conclusions.
        """
        now = time.monotonic()
        since = min(now - self._looked_at, self._config.silence_seconds / _LOOKS_IN_SILENCE)
        self._silent_seconds = 0.0 if heard else self._silent_seconds + since
        self._looked_at = now

    def wait(self, timeout_seconds: float) -> None:
        """Block until there is something to take in, or the time is over."""
        if self._socket is not None:
            select.select([self._socket], [], [], timeout_seconds)

    def kill(self) -> None:
        """End the writer, stopped or not, and wait for that; all its memory is free then.

        One that the kernel holds in a dead disk's system call ends when that call does.
        """
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            select.select([self._pidfd], [], [], _KILL_SECONDS)
        self._drop()

    def close(self, patience_seconds: float = 0.0) -> None:
        """Tell the writer that nothing more comes; it signs off when it has finished.

        Blocks until it has, for at most `patience_seconds`: until then the attempt is this
        process's, and an `attach` of the next one would be refused.
        """
        self._send({"kind": "close"}, [])
        deadline = time.monotonic() + patience_seconds
        while self.alive and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
            for report in self.reports():
                logger.debug("after the end: %s", report)
        self._drop()

    def _tell_keeper(self) -> None:
        """Where rank 0's writer is gone, a next start sees to the attempt without a sign."""
        config = self._config
        if self._keeper_fd is not None and config.rank != 0:
            attempt = CheckpointDirectory(config.directory).attempt(config.attempt)
            with suppress(BrokenPipeError):  # no keeper: it has asked the trainer to stop
                os.write(self._keeper_fd, f"gone {attempt.gone(config.rank)}\n".encode())

    def _send(self, message: dict[str, Any], descriptors: list[int]) -> bool:
        if self._socket is None:
            return False
        self._socket.settimeout(_SEND_SECONDS)
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
        except (BrokenPipeError, ConnectionResetError, TimeoutError) as error:
            # A dead one's last reports are still to be read: `reports` finds the end behind them.
            logger.warning("the writer (process %s) takes nothing: %s", self.pid, error)
            return False
        finally:
            self._socket.setblocking(False)
        return True

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _command(descriptor: int) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(descriptor), _PACKAGES, _XXHASH]
