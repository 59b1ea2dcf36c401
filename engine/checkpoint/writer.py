"""The writer: one small process per rank that puts staged images on disk and outlives its trainer.

It is started by `writer_link`, imports neither torch nor DeepSpeed, and ignores the signals that
stop a job: what was staged is persisted whatever happens to the trainer, and only SIGKILL ends it
early. Everything it is told comes over one SEQPACKET socket, and each image comes as a descriptor.

Who runs what: the main thread takes seals and persists (`intake`), and, on rank 0, commits
(`committer`); in the local tier it writes to the node's own disk only, and a thread goes on from
there to the shared directory (`part`). One thread tells the trainer that the process runs, whatever
the disk does; on rank 0 two more renew the beat, and say when it does not get through or finds the
attempt closed (`beat`).

    trainer -> writer   config, seal (+ image, + draft on rank 0), close
    writer -> trainer   up, alive, persisted, failed, committed, abandoned, pruned, fenced, untidy,
                        persisted_locally, local_failed, committed_locally, beat_lost, beat_restored
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

from engine.checkpoint import priority
from engine.checkpoint.beat import BeatThread
from engine.checkpoint.committer import Committer
from engine.checkpoint.intake import Intake
from engine.checkpoint.local_tier import LocalTier
from engine.checkpoint.part import Parts
from engine.checkpoint.trainer_link import MESSAGE_BYTES, TrainerLink
from engine.checkpoint.under_way import Tally
from engine.protocol import files
from engine.protocol.acquire import Lease
from engine.protocol.layout import AttemptDirectory, CheckpointDirectory
from engine.protocol.local import LocalDisk
from engine.protocol.retention import KeepBest, Retention

_IGNORED = ("SIGHUP", "SIGINT", "SIGTERM", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_IDLE_SECONDS = 5.0
# A dying process closes its sockets some time before it can be waited for.
_LAST_BREATH_SECONDS = 5.0
_PULSES_IN_SILENCE = 12
_PULSE_SECONDS = 1.0  # what is shown of a save should not stand still for longer


@dataclass(frozen=True)
class WriterConfig:
    """What a writer is told once, as JSON.

    `bytes_per_second` caps its writes to `directory`; None leaves them free. `local_run` is the
    run's folder on this node's own disk, None without a local tier. `log` is its stdout and stderr.
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
    local_run: str | None = None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "WriterConfig":
        """Read what `dataclasses.asdict` made of one."""
        best, lease = fields.pop("keep_best"), Lease(**fields.pop("lease"))
        return cls(**fields, lease=lease, keep_best=None if best is None else KeepBest(**best))

    def local_tier(
        self, directory: CheckpointDirectory, attempt: AttemptDirectory, tally: Tally
    ) -> LocalTier | None:
        """Return this rank's local tier, None if it has none."""
        if self.local_run is None:
            return None
        disk = LocalDisk(self.local_run, self.rank, self.world_size)
        return LocalTier(disk, directory, attempt, tally, _log)

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
        self._tally = Tally()
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
                self._tally,
                _log,
            )
        self._intake = Intake(
            self._directory,
            self._attempt,
            trainer,
            Parts(
                self._attempt,
                config.rank,
                config.world_size,
                config.bytes_per_second,
                self._tally,
                _log,
            ),
            config.local_tier(self._directory, self._attempt, self._tally),
            self._committer,
            _log,
        )

    def run(self) -> None:
        """Serve the trainer until it has ended and nothing is left to do; then sign off."""
        self._trainer.tell("up", pid=os.getpid())
        interval = min(_PULSE_SECONDS, self._config.silence_seconds / _PULSES_IN_SILENCE)
        self._trainer.say_alive_every(interval, self._tally.as_json)
        draining = False
        while True:
            message = self._trainer.receive(self._patience_seconds(), self._intake.wake_fd)
            self._trainer.flush()
            if message is not None:
                self._take(*message)
            self._intake.take_in()
            if message is not None:  # a dead trainer's last seals still lie in the socket
                continue
            if not self._trainer.alive:
                if not draining and self._beat is not None:
                    self._beat.drain()
                if not self._has_pending():
                    break
                if draining:  # nothing wakes us any more but our parts; others' we poll for
                    wake = [self._intake.wake_fd]
                    select.select(wake, [], [], self._patience_seconds())
                draining = True
            if self._committer is not None:
                self._committer.serve()
        self._sign_off()

    def _has_pending(self) -> bool:
        return self._intake.busy or (self._committer is not None and self._committer.pending)

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
                self._intake.take(message, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

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
        os._exit(1)  # not held up by a thread that a dead disk holds up


def _redirect(log: str) -> None:
    """Let go of the trainer's stdout and stderr: while they are held open, srun and ssh wait."""
    sink = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, sink), (2, sink)):
        os.dup2(source, target)
    os.close(sink)
    os.close(null)
