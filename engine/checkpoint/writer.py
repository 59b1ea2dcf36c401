"""The writer: one small process per rank that puts staged images on disk and outlives its trainer.

It is started by `writer_link`, imports neither torch nor DeepSpeed, and ignores the signals that
stop a job: what was staged is persisted whatever happens to the trainer, and only SIGKILL ends it
early. Everything it is told comes over one SEQPACKET socket, and each image comes as a descriptor.

Who runs what: the main thread takes seals, persists, and, on rank 0, commits (`committer`). One
thread tells the trainer that the process runs, whatever the disk does; on rank 0 two more renew the
beat, and say when it does not get through or finds the attempt closed (`beat`).

    trainer -> writer   config, seal (+ image, + draft on rank 0), close
    writer -> trainer   up, alive, persisted, failed, committed, abandoned, pruned, fenced, untidy,
                        beat_lost, beat_restored
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from engine.checkpoint import priority
from engine.checkpoint.beat import BeatThread
from engine.checkpoint.committer import Committer
from engine.checkpoint.persist import RateLimit, persist
from engine.checkpoint.trainer_link import MESSAGE_BYTES, TrainerLink
from engine.format import names
from engine.format.errors import FormatError
from engine.format.manifest import Receipt
from engine.protocol import commit, files
from engine.protocol.acquire import Lease
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.retention import KeepBest, Retention

_IGNORED = ("SIGHUP", "SIGINT", "SIGTERM", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_IDLE_SECONDS = 5.0
# A dying process closes its sockets some time before it can be waited for.
_LAST_BREATH_SECONDS = 5.0
_PULSES_IN_SILENCE = 12


@dataclass(frozen=True)
class WriterConfig:
    """What a writer is told once, as JSON.

    `bytes_per_second` caps its disk writes; None leaves them free. `log` is its stdout and stderr.
    A writer that says nothing for `silence_seconds` is taken for stopped, and replaced.
    """

    rank: int
    world_size: int
    directory: str
    attempt: int
    log: str
    host: str
    keep_last: int
    commit_deadline_seconds: float
    lease: Lease
    bytes_per_second: float | None = None
    keep_every_steps: int | None = None
    keep_best: KeepBest | None = None
    silence_seconds: float = 60.0

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "WriterConfig":
        """Read what `dataclasses.asdict` made of one."""
        best, lease = fields.pop("keep_best"), Lease(**fields.pop("lease"))
        return cls(**fields, lease=lease, keep_best=None if best is None else KeepBest(**best))

    @property
    def retention(self) -> Retention:
        """What is kept of the run's history."""
        return Retention(self.keep_last, self.keep_every_steps, self.keep_best)


class Writer:
    """One rank's writer, from its configuration to its end."""

    def __init__(self, config: WriterConfig, trainer: TrainerLink) -> None:
        self._config = config
        self._trainer = trainer
        self._dismissed = False
        self._directory = CheckpointDirectory(config.directory)
        self._attempt = self._directory.attempt(config.attempt)
        self._beat: BeatThread | None = None
        self._committer: Committer | None = None
        if config.rank == 0:
            self._beat = BeatThread(
                self._attempt.path, config.host, config.lease, trainer.tell, _log
            )
            self._committer = Committer(
                self._directory,
                config.attempt,
                config.world_size,
                config.retention,
                config.commit_deadline_seconds,
                trainer.tell,
                _log,
            )

    def run(self) -> None:
        """Serve the trainer until it has ended and nothing is left to do; then sign off."""
        self._trainer.tell("up", pid=os.getpid())
        self._trainer.say_alive_every(self._config.silence_seconds / _PULSES_IN_SILENCE)
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
                self._dismissed = True
                self._trainer.alive = False
            elif message["kind"] == "seal":
                self._take_seal(message, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _take_seal(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Persist one sealed image, and let rank 0 wait for the others'.

        A seal comes again after a writer's death, without its image if that was persisted.
        """
        draft = _read_draft(descriptors[-1]) if self._committer is not None else None
        name, save_id = message["save"], message["save_id"]
        started = time.monotonic()
        try:
            if message["again"] and commit.is_committed(self._directory, save_id):
                self._report_committed(message)
                return
            if message["has_image"]:
                self._persist(message, descriptors[0], draft)
                seconds = time.monotonic() - started
                self._trainer.tell(
                    "persisted", save_id=save_id, bytes=message["size_bytes"], seconds=seconds
                )
        except (OSError, FormatError) as error:
            self._give_up(name, save_id, draft, message["sealed_at"], error)
            return
        if self._committer is not None and draft is not None:
            self._committer.add(name, draft, message["sealed_at"])

    def _report_committed(self, message: dict[str, Any]) -> None:
        """Say what the writer before this one did not get to say."""
        fields = {"save_id": message["save_id"], "bytes": message["size_bytes"]}
        seconds = time.monotonic() - message["sealed_at"]
        self._trainer.tell("persisted", **fields, seconds=0.0)
        if self._committer is not None:
            self._trainer.tell("committed", **fields, seconds=seconds)

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

    def _give_up(
        self,
        name: str,
        save_id: str,
        draft: dict[str, Any] | None,
        sealed_at: float,
        error: Exception,
    ) -> None:
        """Take back this rank's part of a save; rank 0's writer will abandon the whole."""
        _log(f"{save_id}: given up: {error}")
        save = self._attempt.save(name)
        rank, world_size = self._config.rank, self._config.world_size
        for action, path in (  # the receipt first: no receipt may stand for a shard that has gone
            (os.unlink, os.path.join(save, names.receipt_name(rank, world_size))),
            (os.unlink, os.path.join(save, names.shard_name(rank, world_size))),
            (files.touch, os.path.join(save, names.failed_name(rank))),
        ):
            try:
                action(path)
            except OSError as second:
                if not files.is_gone(second):
                    _log(f"{save_id}: {path}: {second}")
        if commit.is_taken_over(self._directory, self._config.attempt):
            self._trainer.tell("fenced", save_id=save_id, reason=str(error))
            return
        reason = str(error)
        if isinstance(error, OSError) and files.is_gone(error):
            reason += f"; was {self._config.directory} removed, or is it no longer mounted?"
        if self._committer is not None and draft is not None:
            self._committer.add(name, draft, sealed_at, failure=f"rank 0: {reason}")
        else:
            self._trainer.tell("failed", save_id=save_id, reason=reason)

    def _sign_off(self) -> None:
        """Leave the sign that nothing more comes from this rank; rank 0's closes the attempt.

        Not where the trainer lives on without a word: it has given this writer up, and another one
        goes on with the attempt.
        """
        if not (self._dismissed or self._trainer.ends_within(_LAST_BREATH_SECONDS)):
            _log("exit: the trainer has another writer")
            return
        if self._beat is not None:
            self._beat.end()
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
    message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
    if not message:
        return
    config = WriterConfig.from_json(json.loads(message))
    os.chdir("/")
    _redirect(config.log)
    try:
        priority.lower(_log)
        Writer(config, TrainerLink(connection, descriptors[0])).run()
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
