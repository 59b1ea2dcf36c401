"""``python -m engine``: look at checkpoints, take weights out, take checkpoints in.

    python -m engine ls DIR [--strays]              a table of the checkpoints
    python -m engine show DIR [--tag T] [--json]    what one checkpoint holds
    python -m engine verify DIR [--tag T | --all [--strays]]
                                                    read every byte, and name what is damaged
    python -m engine stream DIR --step N            what was in that step's batch
    python -m engine stream DIR --sample K          the same of one sample, with its whole text
    python -m engine diff DIR TAG TAG               which weights moved between two, and how far
    python -m engine export DIR --out OUT           its weights, for Hugging Face's from_pretrained
    python -m engine import SRC --out DIR           a checkpoint that DeepSpeed's ZeRO-3 has saved

DIR is a run directory, a checkpoints directory, or one checkpoint's directory. How far long work is
stands on stderr; `--quiet` keeps it silent. Exit codes: 0 all is well, 1 a checkpoint is damaged or
cannot be read, its data are gone, or its weights stand still, 2 there is nothing such to look at,
it was removed meanwhile, what is to be written cannot be, or the arguments are wrong, 130
interrupted.
"""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from engine import byte_bar, describe, inspect, tool, verifying
from engine.arguments import parser
from engine.exchange.errors import ExchangeError
from engine.format.errors import FormatError

EXIT_DAMAGED = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Prints to stdout, errors to stderr."""
    options = parser().parse_args(arguments)
    return tool.run("engine", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    try:
        return _COMMANDS[options.command](options)
    except (inspect.InspectError, ExchangeError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return EXIT_USAGE
    except FormatError as error:
        print(f"engine: {error}", file=sys.stderr)
        return EXIT_DAMAGED


def _ls(options: argparse.Namespace) -> int:
    place = inspect.locate(options.dir)
    listed = inspect.listing(place, strays=False) + inspect.only_local(place)
    now = datetime.datetime.now(datetime.timezone.utc)
    print(*describe.table(listed, now), sep="\n")
    if options.strays:
        strays = inspect.listing(place, strays=True)
        print("\nstrays: off the line of history, never resumed from unless named")
        print(*describe.table(strays, now), sep="\n")
        listed += strays
    errors = [one.error for one in listed if one.error is not None]
    for error in errors:
        print(f"engine: {error}", file=sys.stderr)
    return EXIT_DAMAGED if errors else 0


def _show(options: argparse.Namespace) -> int:
    path = inspect.choose(inspect.locate(options.dir), options.tag)
    manifest = inspect.load(path)
    if options.json:
        print(json.dumps(manifest.to_json(), indent=2))
    else:
        print(*describe.summary(manifest, path), sep="\n")
    return 0


def _verify(options: argparse.Namespace) -> int:
    if options.strays and not options.all:
        raise inspect.InspectError("--strays goes with --all; one of them is named with --tag")
    place = inspect.locate(options.dir)
    paths = inspect.choose_all(place) if options.all else [inspect.choose(place, options.tag)]
    strays = inspect.choose_strays(place) if options.all else []
    if options.strays:
        paths, strays = paths + strays, []
    found = []
    with _bar(options, "", verifying.size_of(paths)) as bar:
        for number, path in enumerate(paths, 1):
            counter = f"{number} of {len(paths)}: " if len(paths) > 1 else ""
            bar.name(f"{counter}{os.path.basename(path).partition('.')[0]}")
            one = verifying.verify(path, bar.advance)
            found.append(one)
            if one.error is not None:
                bar.say(f"engine: {one.error}", sys.stderr)
            for line in () if options.json else verifying.lines(one):
                bar.say(line, sys.stdout)
    unread = verifying.Unread(
        [os.path.basename(path) for path in strays],
        [one.name for one in inspect.only_local(place)] if options.all else [],
    )
    if options.json:
        print(json.dumps(verifying.as_json(found, unread), indent=2))
    elif options.all:
        print(*verifying.summary(found, unread), sep="\n")
    outcomes = {one.outcome for one in found}
    if outcomes & {verifying.DAMAGED, verifying.UNREADABLE}:
        return EXIT_DAMAGED
    return EXIT_USAGE if verifying.GONE in outcomes else 0


def _stream(options: argparse.Namespace) -> int:
    from engine import look  # numpy, and maybe torch: only for this command

    manifest = inspect.load(inspect.choose(inspect.locate(options.dir), options.tag))
    if options.step is not None:
        offsets = look.offsets_of_step(manifest, options.step)
    else:
        offsets = range(options.sample, options.sample + 1)
    batch = look.look(manifest, offsets, options.tokenizer)
    for note in batch.notes:
        print(f"note: {note}", file=sys.stderr)
    for sample in batch.samples:
        print(*describe.sample(sample, whole=options.sample is not None), sep="\n")
    for error in batch.errors:
        print(f"engine: {error}", file=sys.stderr)
    return EXIT_DAMAGED if batch.errors else 0


def _diff(options: argparse.Namespace) -> int:
    from engine.exchange import compared  # numpy: only for this command
    from engine.exchange.checkpoint import StoredWeights
    from engine.exchange.compare import Compare

    place = inspect.locate(options.dir)
    before, after = (inspect.choose(place, tag) for tag in (options.before, options.after))
    with (
        StoredWeights(before, whole=False) as earlier,
        StoredWeights(after, whole=False) as later,
    ):
        work = Compare(earlier, later, full=options.verify == "full")
        with _bar(options, f"{options.before} {options.after}", work.work_bytes) as bar:
            found = work.run(bar.advance)
    if options.json:
        print(json.dumps(compared.as_json(found), indent=2))
    else:
        print(*compared.lines(found, options.top), sep="\n")
    alarm = compared.alarm(found)
    if alarm is not None:
        print(f"engine: {alarm}", file=sys.stderr)
    return 0 if alarm is None else EXIT_DAMAGED


def _export(options: argparse.Namespace) -> int:
    from engine.exchange import export, shards  # numpy: only for this command
    from engine.exchange.checkpoint import StoredWeights

    wanted = export.Options(
        dtype=options.dtype,
        shard_bytes=shards.parse_size(options.shard_size),
        full=options.verify == "full",
        tokenizer=options.tokenizer,
    )
    with StoredWeights(inspect.choose(inspect.locate(options.dir), options.tag)) as stored:
        work = export.Export(stored, options.out, wanted)
        with _bar(options, stored.manifest.tag, work.work_bytes) as bar:
            work.run(bar.advance)
        for note in work.notes:
            print(f"note: {note}", file=sys.stderr)
        if work.kept:
            print(f"kept from an earlier start: {len(work.kept)} of {len(work.shards)} shards")
        print(f"{stored.manifest.tag}: {len(stored.weights)} tensors exported to {options.out}")
    return 0


def _import(options: argparse.Namespace) -> int:
    from engine.exchange import importing  # torch: only for this command
    from engine.exchange.deepspeed_files import DeepSpeedCheckpoint
    from engine.exchange.description import Options

    if options.sample_offset is not None and options.sample_offset < 0:
        raise ExchangeError(f"--sample-offset {options.sample_offset}: wanted 0 or more")
    source = DeepSpeedCheckpoint(options.dir, options.tag)
    wanted = Options(options.sample_offset, options.optimizer)
    with _bar(options, source.tag, source.size_bytes) as bar:
        done = importing.import_checkpoint(source, options.out, wanted, bar.advance)
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{done.tag}: imported from {source.path}, {done.world_size} ranks, into {options.out}")
    return 0


def _bar(options: argparse.Namespace, what: str, total_bytes: int) -> byte_bar.ByteBar:
    return byte_bar.ByteBar(
        what,
        total_bytes,
        on_terminal=byte_bar.moves_cursor(sys.stderr, os.environ),
        quiet=options.quiet,
    )


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "stream": _stream,
    "diff": _diff,
    "export": _export,
    "import": _import,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
