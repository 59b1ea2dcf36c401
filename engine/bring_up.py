"""Bring a DeepSpeed engine and a checkpoint directory together: the start of an attempt.

Collective. Rank 0 takes the attempt's number, every rank checks that it sees the same directory and
starts its writer, and DeepSpeed's checkpoint engine is replaced by ours.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from engine.checkpoint import keeper_pipe
from engine.checkpoint.collective import Agreement
from engine.checkpoint.copier import copier_for
from engine.checkpoint.deepspeed_engine import install
from engine.checkpoint.errors import CheckpointError, RefusedError
from engine.checkpoint.options import CheckpointOptions
from engine.checkpoint.saver import Saver
from engine.checkpoint.session import Session
from engine.checkpoint.under_way import UnderWay
from engine.checkpoint.writer import WriterConfig
from engine.checkpoint.writer_link import WriterLink, WriterStartError
from engine.checkpoint.zero3 import Layout
from engine.checkpointer import Checkpointer
from engine.format.errors import FormatError
from engine.protocol import files, local
from engine.protocol.acquire import RunHeldError, UnsuitableDirectoryError, acquire
from engine.protocol.layout import OWNER, AttemptDirectory, CheckpointDirectory
from engine.protocol.local import LocalDisk
from engine.protocol.owner import Owner, Place

logger = logging.getLogger(__name__)

_SEEN_SECONDS = 60.0
_PAUSE_SECONDS = 0.1
_ERRORS = (RunHeldError, UnsuitableDirectoryError, FormatError, OSError)


def attach(
    ds_engine: Any,
    directory: str,
    options: CheckpointOptions = CheckpointOptions(),  # noqa: B008  # frozen: shared safely
    *,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    on_progress: Callable[[UnderWay], None] | None = None,
    fingerprint: Any = None,
    keeper_fd: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Checkpointer:
    """Start an attempt at training `ds_engine`, with its checkpoints in `directory`.

    Collective over all ranks, after `deepspeed.initialize`. Blocks while an older attempt's writer
    still finishes what it was given.

    Args:
        ds_engine: a DeepSpeed ZeRO-3 engine; its checkpoint engine is replaced.
        directory: made if it is not there; shared by all ranks.
        on_event: called on the training thread with a dict for each thing that happens to a save.
        on_progress: called on the training thread with how far this rank is with a checkpoint: at
            each `poll`, once a second while a call waits, and for every few megabytes that
            `resume` reads.
        fingerprint: identity of the data, JSON; stored with every save.
        keeper_fd: a pipe end for the writer to hold for as long as it lives; told, by a line, which
            sign to leave for a rank whose processes were all killed. By default the one of
            `python -m launcher.keep`, if that started this process.
        environment: where Slurm's and the keeper's variables are looked up; this process's own by
            default.

    Raises:
        RunHeldError: another live run holds the directory.
        RefusedError: the engine's settings hold state that cannot be saved.
        CheckpointError: the directory is not shared by all ranks, or does not serve; or
            `local_dir` does not, on one of the nodes; or the keeper's pipe was lost on the way.
    """
    agreement = Agreement()
    layout = _layout(ds_engine, agreement, options)
    root = os.path.abspath(directory)
    paths = CheckpointDirectory(root)
    environment = os.environ if environment is None else environment
    if keeper_fd is None:
        keeper_fd = _keeper_pipe(environment, agreement)

    def take_number() -> dict[str, Any]:
        me = Owner.this_process(agreement.world_size, environment)
        taken = acquire(paths, me, options.lease)
        run = None if options.local_dir is None else local.run_of(paths)
        return {"attempt": taken.attempt, "nonce": taken.nonce, "root": root, "run": run}

    try:
        taken = agreement.on_rank_0(take_number, _ERRORS)
    except OSError as error:
        raise CheckpointError(f"checkpoint.dir={root} does not serve: {error}") from error
    attempt, nonce = taken["attempt"], taken["nonce"]
    _require_shared(paths.attempt(attempt), nonce, agreement, root, taken["root"])
    local_run = _make_local_folder(paths, options.local_dir, taken["run"], agreement)
    link = _start_writer(paths, attempt, agreement, options, local_run, keeper_fd)
    logger.info("attempt %d in %s", attempt, root)
    checkpoint_engine, copier = install(ds_engine), copier_for(ds_engine.device)
    session = Session(
        ds_engine,
        checkpoint_engine,
        layout,
        paths,
        attempt,
        nonce,
        agreement,
        None if local_run is None else LocalDisk(local_run, agreement.rank, agreement.world_size),
        on_event,
        on_progress,
    )
    saver = Saver(link, agreement.rank, layout, copier, on_event, on_progress)
    if copier.overlaps:
        checkpoint_engine.before_step = saver.finish_copy
    return Checkpointer(session, saver, options, fingerprint)


def _layout(ds_engine: Any, agreement: Agreement, options: CheckpointOptions) -> Layout:
    layout, reason = None, ""
    try:
        layout = Layout.of(ds_engine, holds_frozen=not options.exclude_frozen)
        if options.exclude_frozen and all(parameter.trainable for parameter in layout.parameters):
            reason = (
                "exclude_frozen is on, and no parameter is frozen: set requires_grad to False on "
                "the base before deepspeed.initialize, or exclude_frozen to false"
            )
    except RefusedError as error:
        reason = str(error)
    agreement.require(reason, RefusedError)
    assert layout is not None, "without one there was a reason"
    return layout


def _keeper_pipe(environment: Mapping[str, str], agreement: Agreement) -> int | None:
    pipe, reason = None, ""
    try:
        pipe = keeper_pipe.inherited(environment)
    except CheckpointError as error:
        reason = str(error)
    agreement.require(reason, CheckpointError)
    return pipe


def _require_shared(
    attempt: AttemptDirectory, nonce: str, agreement: Agreement, mine: str, rank_0s: str
) -> None:
    """Every rank must see the very attempt that rank 0 has made."""
    reason = ""
    if not _sees(attempt, nonce):
        reason = (
            f"the checkpoint directory {mine} is not the one that rank 0 uses ({rank_0s}): its "
            f"attempt {attempt.number} is not there after {_SEEN_SECONDS:g} s. Set checkpoint.dir "
            "to a directory that all nodes share"
        )
    agreement.require(reason, CheckpointError)


def _sees(attempt: AttemptDirectory, nonce: str) -> bool:
    deadline = time.monotonic() + _SEEN_SECONDS
    while True:
        if OWNER in files.fresh_listing(attempt.path):
            data = files.read_listed(attempt.owner)
            return data is not None and Owner.from_bytes(data, attempt.owner).nonce == nonce
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_SECONDS)


def _make_local_folder(
    paths: CheckpointDirectory, local_dir: str | None, run: str, agreement: Agreement
) -> str | None:
    """Every rank makes the run's folder on its node's own disk; None without a local tier."""
    if local_dir is None:
        return None
    folder, reason = None, ""
    try:
        folder = local.make_folder(local_dir, run, paths)
    except UnsuitableDirectoryError as error:
        reason = str(error)
    agreement.require(reason, CheckpointError)
    return folder


def _start_writer(
    paths: CheckpointDirectory,
    attempt: int,
    agreement: Agreement,
    options: CheckpointOptions,
    local_run: str | None,
    keeper_fd: int | None,
) -> WriterLink:
    logs = options.log_directory or paths.attempt(attempt).path
    link = WriterLink(
        WriterConfig(
            rank=agreement.rank,
            world_size=agreement.world_size,
            directory=paths.root,
            attempt=attempt,
            log=os.path.join(logs, f"writer_{agreement.rank:05d}.log"),
            host=Place.here().host,
            keep_last=options.keep_last,
            commit_deadline_seconds=options.commit_deadline_seconds,
            lease=options.lease,
            bytes_per_second=options.bytes_per_second,
            keep_every_steps=options.keep_every_steps,
            keep_best=options.keep_best,
            silence_seconds=options.writer_silence_seconds,
            local_run=local_run,
        ),
        keeper_fd,
    )
    reason = ""
    try:
        link.start()
    except (WriterStartError, OSError) as error:
        reason = str(error)
    agreement.require(reason, CheckpointError)
    return link
