"""The writer: one small process per rank that puts staged images on disk and outlives its trainer.

It is started by `writer_link`, imports neither torch nor DeepSpeed, and ignores the signals that
stop a job: what was staged is persisted whatever happens to the trainer, and only SIGKILL ends it
early. Everything it is told comes over one SEQPACKET socket, and each image comes as a descriptor.

Who runs what: the main thread takes seals, persists, and, on rank 0, commits (`committer`). On rank
0 a second thread renews the beat (`beat`).

    trainer -> writer   config, seal (+ image, + draft on rank 0), close
    writer -> trainer   up, persisted, failed, committed, abandoned, pruned, fenced
"""

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.beat import BeatThread
from engine.checkpoint.committer import Committer
from engine.checkpoint.persist import RateLimit, persist
from engine.format import names
from engine.format.errors import FormatError
from engine.format.manifest import Receipt
from engine.protocol import commit, files
from engine.protocol.layout import CheckpointDirectory

_MESSAGE_BYTES = 64 << 10
_MAX_DESCRIPTORS = 4
_IGNORED = ("SIGHUP", "SIGINT", "SIGTERM", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_IDLE_SECONDS = 5.0
_NICENESS = 10


@dataclass(frozen=True)
class WriterConfig:
    """What a writer is told once, as JSON.

    `bytes_per_second` caps its disk writes; None leaves them free. `log` is its stdout and stderr.
    """

    rank: int
    world_size: int
    directory: str
    attempt: int
    log: str
    host: str
    keep_last: int
    commit_deadline_seconds: float
    beat_seconds: float
    bytes_per_second: float | None = None


class Trainer:
    """The writer's end of the socket, and the trainer's life."""

    def __init__(self, connection: socket.socket, pidfd: int) -> None:
        self._socket = connection
        self._pidfd = pidfd
        self._unsent: list[bytes] = []
        self.alive = True

    def receive(self, timeout_seconds: float) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors; None if there is none in time.

        Once the trainer is dead what it has sent is still delivered, and then None at once.
        """
        watched: list[Any] = [self._socket]
        if self.alive:
            watched.append(self._pidfd)
        ready, _, _ = select.select(watched, [], [], timeout_seconds if self.alive else 0)
        if self._pidfd in ready:
            # Not the end of the stream: forked data workers may hold the trainer's end open.
            self.alive = False
        if self._socket not in ready:
            return None
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _MESSAGE_BYTES, _MAX_DESCRIPTORS
            )
        except OSError:
            data, descriptors = b"", []
        if not data:  # the trainer closed its end, or is about to be reported dead
            self.alive = False
            return None
        return json.loads(data), descriptors

    def tell(self, kind: str, **fields: Any) -> None:
        """Queue a message; it is sent when the trainer takes it, and dropped when it has died."""
        self._unsent.append(json.dumps({"kind": kind, **fields}).encode())
        self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it without blocking."""
        while self._unsent:
            try:
                self._socket.send(self._unsent[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            self._unsent.pop(0)


class Writer:
    """One rank's writer, from its configuration to its end."""

    def __init__(self, config: WriterConfig, trainer: Trainer) -> None:
        self._config = config
        self._trainer = trainer
        self._directory = CheckpointDirectory(config.directory)
        self._attempt = self._directory.attempt(config.attempt)
        self._beat: BeatThread | None = None
        self._committer: Committer | None = None
        if config.rank == 0:
            self._beat = BeatThread(self._attempt.path, config.host, config.beat_seconds, _log)
            self._committer = Committer(
                self._directory,
                config.attempt,
                config.world_size,
                config.keep_last,
                config.commit_deadline_seconds,
                trainer.tell,
                _log,
            )

    def run(self) -> None:
        """Serve the trainer until it has ended and nothing is left to do; then sign off."""
        self._trainer.tell("up", pid=os.getpid())
        draining = False
        while True:
            message = self._trainer.receive(self._patience_seconds())
            self._trainer.flush()
            if message is not None:  # a dead trainer's last seals still lie in the socket
                self._take(*message)
                continue
            if not self._trainer.alive:
                if not draining and self._beat is not None:
                    self._beat.drain()
                if not self._has_pending():
                    break
                if draining:  # nothing wakes us any more but the receipts we poll for
                    time.sleep(self._patience_seconds())
                draining = True
            if self._committer is not None:
                self._committer.serve()
        self._sign_off()

    def _has_pending(self) -> bool:
        return self._committer is not None and self._committer.pending

    def _patience_seconds(self) -> float:
        if self._committer is not None and self._committer.pending:
            return float(self._committer.poll_seconds)
        return _IDLE_SECONDS

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        try:
            if message["kind"] == "close":
                self._trainer.alive = False
            elif message["kind"] == "seal":
                self._take_seal(message, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _take_seal(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Persist one sealed image. Idempotent: a seal is sent again after a writer's death."""
        draft = _read_draft(descriptors[1]) if len(descriptors) > 1 else None
        name, save_id = message["save"], message["save_id"]
        try:
            started = time.monotonic()
            self._persist(message, descriptors[0], draft)
            self._trainer.tell(
                "persisted",
                save_id=save_id,
                bytes=message["size_bytes"],
                seconds=time.monotonic() - started,
            )
        except (OSError, FormatError) as error:
            self._give_up(name, save_id, error)
            return
        if self._committer is not None and draft is not None:
            self._committer.add(name, draft)

    def _persist(self, message: dict[str, Any], image: int, draft: dict[str, Any] | None) -> None:
        config = self._config
        save = self._attempt.save(message["save"])
        try:
            os.mkdir(save)  # fails where the attempt is over: its open/ is gone
        except FileExistsError:
            pass
        receipt_path = os.path.join(save, names.receipt_name(config.rank, config.world_size))
        shard = names.shard_name(config.rank, config.world_size)
        listed = files.fresh_listing(save)
        if os.path.basename(receipt_path) in listed:
            return  # a writer before this one got as far as the receipt
        if shard in listed:
            os.unlink(os.path.join(save, shard))  # ... or died while writing
        started = time.monotonic()
        written = persist(
            image,
            message["size_bytes"],
            message["data_offset"],
            os.path.join(save, shard),
            RateLimit(config.bytes_per_second),
        )
        files.fsync_directory(save)
        receipt = Receipt(
            save_id=message["save_id"],
            rank=config.rank,
            world_size=config.world_size,
            name=shard,
            size_bytes=message["size_bytes"],
            data_offset=message["data_offset"],
            digest=written.digest,
            header_digest=written.header_digest,
            seconds=time.monotonic() - started,
            draft=draft,
        )
        files.write_durably(receipt_path, receipt.to_bytes())
        _log(f"{message['save_id']}: receipt after {time.monotonic() - started:.2f} s")

    def _give_up(self, name: str, save_id: str, error: Exception) -> None:
        """Take back this rank's part of a save; rank 0's writer will abandon the whole."""
        _log(f"{save_id}: given up: {error}")
        save = self._attempt.save(name)
        shard = names.shard_name(self._config.rank, self._config.world_size)
        for action, path in (
            (os.unlink, os.path.join(save, shard)),
            (files.touch, os.path.join(save, names.failed_name(self._config.rank))),
        ):
            try:
                action(path)
            except OSError as second:
                if not files.is_gone(second):
                    _log(f"{save_id}: {path}: {second}")
        fenced = commit.is_fenced(self._directory, self._config.attempt)
        self._trainer.tell("fenced" if fenced else "failed", save_id=save_id, reason=str(error))
        if self._committer is not None and not fenced:
            self._committer.abandon(name, save_id, f"rank 0: {error}")

    def _sign_off(self) -> None:
        try:
            if self._config.rank == 0:
                files.rename_new(self._attempt.open, self._attempt.closed)
            else:
                files.touch(self._attempt.gone(self._config.rank))
        except OSError as error:
            if not files.is_gone(error):
                _log(f"signing off: {error}")
        self._trainer.flush()
        _log("exit")


def _read_draft(descriptor: int) -> dict[str, Any]:
    """Read the manifest's draft: it can be larger than a socket message, so it comes as a memfd."""
    draft: dict[str, Any] = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    return draft


def _log(text: str) -> None:
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} writer {os.getpid()}: {text}\n"
    try:
        os.write(sys.stderr.fileno(), line.encode())
    except OSError:
        pass  # a full disk must not stop the writer from saying so to its trainer


def main(descriptor: int) -> None:
    """Be a writer whose socket is `descriptor`. Forks once: its parent must not wait for it."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    connection = socket.socket(fileno=descriptor)
    message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
    if not message:
        return
    config = WriterConfig(**json.loads(message))
    os.chdir("/")
    _redirect(config.log)
    try:
        os.nice(_NICENESS)
        Writer(config, Trainer(connection, descriptors[0])).run()
    except BaseException:
        _log(traceback.format_exc())
        raise


def _redirect(log: str) -> None:
    """Let go of the trainer's stdout and stderr: while they are held open, srun and ssh wait."""
    sink = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, sink), (2, sink)):
        os.dup2(source, target)
    os.close(sink)
    os.close(null)
