"""``python -m engine``: look at checkpoints, take weights out, take checkpoints in.

    python -m engine ls DIR [--strays]              a table of the checkpoints
    python -m engine show DIR [--tag T] [--json]    what one checkpoint holds
    python -m engine verify DIR [--tag T | --all]   read every byte, and name what is damaged
    python -m engine stream DIR --step N            what was in that step's batch
    python -m engine stream DIR --sample K          the same of one sample, with its whole text
    python -m engine diff DIR TAG TAG               which weights moved between two, and how far
    python -m engine export DIR --out OUT           its weights, for Hugging Face's from_pretrained
    python -m engine import SRC --out DIR           a checkpoint that DeepSpeed's ZeRO-3 has saved

DIR is a run directory, a checkpoints directory, or one checkpoint's directory. Exit codes: 0 all is
well, 1 a checkpoint is damaged, its data are gone, or its weights stand still, 2 there is nothing
such to look at, what is to be written cannot be, or the arguments are wrong.
"""

import argparse
import contextlib
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from engine import describe, inspect
from engine.exchange.errors import ExchangeError
from engine.format.errors import FormatError

EXIT_DAMAGED = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Prints to stdout, errors to stderr."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except (inspect.InspectError, ExchangeError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return EXIT_USAGE
    except FormatError as error:
        print(f"engine: {error}", file=sys.stderr)
        return EXIT_DAMAGED
    except BrokenPipeError:  # `... | head` has seen enough; the exit must not flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description="Look at checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=run)
        command.add_argument(
            "dir", metavar="DIR", help="a run, a checkpoints or a checkpoint's directory"
        )
        return command

    ls = add("ls", _ls, "List the checkpoints.")
    ls.add_argument("--strays", action="store_true", help="list those off the line of history too")
    show = add("show", _show, "Describe one checkpoint; the newest unless --tag is given.")
    show.add_argument("--tag", help="global_step<number>, or the name of a stray")
    show.add_argument("--json", action="store_true", help="print the whole manifest as JSON")
    verify = add("verify", _verify, "Read every byte of the newest checkpoint; name all damage.")
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--tag", help="verify this one: global_step<number> or a stray's name")
    which.add_argument("--all", action="store_true", help="verify all that are committed")
    stream = add("stream", _stream, "Say which samples made a step's batch, and what they are.")
    what = stream.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, help="the step, as in metrics.jsonl")
    what.add_argument("--sample", type=int, help="one sample offset; its text is printed whole")
    stream.add_argument("--tag", help="by this checkpoint's record; the newest unless given")
    stream.add_argument("--tokenizer", metavar="FILE", help="a tokenizers JSON file, to decode by")
    diff = add("diff", _diff, "Say which weights moved between two checkpoints, and how far.")
    diff.add_argument("before", metavar="TAG", help="the earlier one: global_step<number>")
    diff.add_argument("after", metavar="TAG", help="the later one")
    diff.add_argument("--top", type=_count, metavar="N", help="show the N that moved most")
    diff.add_argument("--json", action="store_true", help="all of it, for programs")
    diff.add_argument(
        "--verify", default="full", choices=("full", "size"), help="compare digests, or sizes only"
    )
    export = add("export", _export, "Write a checkpoint's weights for from_pretrained.")
    export.add_argument("--tag", help="global_step<number> or a stray's name; else the newest")
    export.add_argument("--out", required=True, metavar="OUT", help="a directory, made by this")
    export.add_argument(
        "--dtype",
        default="as-trained",
        choices=("as-trained", "bf16", "fp16", "fp32"),
        help="of all parameters; fp32 gives the masters. Buffers keep their own",
    )
    export.add_argument("--shard-size", default="5GB", metavar="SIZE", help="5GB unless given")
    export.add_argument(
        "--verify", default="full", choices=("full", "size"), help="compare digests, or sizes only"
    )
    export.add_argument("--tokenizer", metavar="DIR", help="copy a tokenizer's files from there")
    text = "Make a ZeRO-3 checkpoint that DeepSpeed wrote one of this format."
    importing = commands.add_parser("import", help=text, description=text)
    importing.set_defaults(command=_import)
    importing.add_argument("dir", metavar="SRC", help="what save_checkpoint was given")
    importing.add_argument("--out", required=True, metavar="DIR", help="the checkpoints directory")
    importing.add_argument("--tag", help="the one to import; what `latest` names unless given")
    importing.add_argument(
        "--sample-offset", type=int, metavar="N", help="samples used; else DeepSpeed's own count"
    )
    importing.add_argument(
        "--optimizer", metavar="CLASS", help="its qualified name; else by DeepSpeed's configuration"
    )
    return parser


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
    place = inspect.locate(options.dir)
    paths = inspect.choose_all(place) if options.all else [inspect.choose(place, options.tag)]
    codes = {_verify_one(path) for path in paths}
    return EXIT_DAMAGED if EXIT_DAMAGED in codes else max(codes)


def _verify_one(path: str) -> int:
    name = os.path.basename(path)
    try:
        with _progress_bar(name, inspect.size_of(path)) as progress:
            problems = inspect.verify(path, progress)
    except inspect.GoneError as error:  # the others are verified all the same
        print(f"engine: {error}", file=sys.stderr)
        return EXIT_USAGE
    for problem in problems:
        print(f"{name}/{problem}")
    if not problems:
        print(f"{name}: intact")
    return EXIT_DAMAGED if problems else 0


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
        with _progress_bar(f"{options.before} {options.after}", work.work_bytes) as progress:
            found = work.run(progress)
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
        with _progress_bar(stored.manifest.tag, work.work_bytes) as progress:
            work.run(progress)
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
    with _progress_bar(source.tag, source.size_bytes) as progress:
        done = importing.import_checkpoint(source, options.out, wanted, progress)
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{done.tag}: imported from {source.path}, {done.world_size} ranks, into {options.out}")
    return 0


def _count(text: str) -> int:
    """Return a number of rows that the command line gives."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: wanted a number from 1")
    return int(text)


@contextlib.contextmanager
def _progress_bar(name: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Yield what advances a progress bar by bytes; None where no terminal would show it."""
    if not sys.stderr.isatty():
        yield None
        return
    import tqdm

    with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc=name, leave=False) as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
