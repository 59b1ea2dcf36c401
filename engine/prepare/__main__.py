"""``everstep-data prepare INPUT... --out DIR --tokenizer bytes|FILE.json``: text -> token files.

Exit codes: 0 the folder is complete, 1 an input cannot be used or the disk failed, 2 the arguments
are wrong, 130 interrupted. After anything but a wrong argument, the same command continues.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine import byte_bar
from engine.byte_bar import ByteBar
from engine.prepare import encoders
from engine.prepare.encoders import Choice
from engine.prepare.errors import PrepareError, UsageError
from engine.prepare.inputs import FOLDER_SUFFIXES, Reading
from engine.prepare.part import Made
from engine.prepare.prepare import Job, Progress, prepare
from engine.tool import EXIT_INTERRUPTED

EXIT_FAILED = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. The result goes to stdout, the rest to stderr."""
    options = _parser().parse_args(arguments)
    job = _job(options)
    try:
        with ExitStack() as stack:
            described = prepare(job, _progress(stack, options.quiet))
    except UsageError as error:
        print(f"everstep-data: {error}", file=sys.stderr)
        return EXIT_USAGE
    except PrepareError as error:
        print(f"everstep-data: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        where = error.filename or job.out  # writing does not say to what
        print(
            f"everstep-data: {where}: {error.strerror or error}; when that is put right, the same "
            "command continues",
            file=sys.stderr,
        )
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("everstep-data: interrupted; the same command continues", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(
        f"{job.out}: {described['documents']} documents, {described['tokens']} tokens of "
        f"{described['dtype']}, vocabulary {described['vocab_size']}\n"
        f"everstep data=megatron data.components.tokens.path={job.out} "
        f"model.vocab_size={described['vocab_size']}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="everstep-data", description="Make token files.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = (
        "Tokenise text files, JSON lines and Parquet into a folder of Megatron .idx/.bin pairs. "
        "Killed and started again it continues, and the bytes are the same."
    )
    add = commands.add_parser("prepare", help=text, description=text).add_argument
    add("inputs", nargs="+", metavar="INPUT", help="files, or folders of them")
    add("--out", required=True, type=Path, metavar="DIR", help="the folder to make")
    add(
        "--tokenizer",
        required=True,
        metavar="bytes|FILE.json|tokens",
        help="bytes: no tokenizer, vocabulary 257. FILE.json: of Hugging Face's tokenizers. "
        "tokens: inputs hold lists of tokens already",
    )
    add(
        "--field",
        help="key of JSON lines, or column of Parquet (default text; input_ids of tokens)",
    )
    add(
        "--suffix",
        action="append",
        metavar=".END",
        help=f"take these files from folders (default {' '.join(FOLDER_SUFFIXES)}, also with .gz); "
        "may be repeated",
    )
    add("--end-of-document", metavar="TOKEN", help="default: the tokenizer's usual one")
    add("--vocab-size", type=_positive, metavar="N", help="with --tokenizer tokens")
    add("--text-lines", action="store_true", help="each line of a text file is a document")
    add(
        "--replace-invalid",
        action="store_true",
        help="put U+FFFD for what is not UTF-8, instead of stopping",
    )
    add(
        "--part-mebibytes",
        type=_positive,
        default=256,
        metavar="N",
        help="input for one pair of files, default %(default)s",
    )
    add(
        "--processes",
        type=_positive,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="default: one per processor; the result does not depend on it",
    )
    add("-q", "--quiet", action="store_true", help="show no progress")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted 1 or more, found {value}")
    return value


def _job(options: argparse.Namespace) -> Job:
    ready = options.tokenizer == encoders.TOKENS
    return Job(
        inputs=tuple(options.inputs),
        suffixes=tuple(options.suffix or FOLDER_SUFFIXES),
        out=options.out,
        reading=Reading(
            field=options.field or ("input_ids" if ready else "text"),
            text_lines=options.text_lines,
            replace_invalid=options.replace_invalid,
        ),
        choice=Choice(
            options.tokenizer, options.end_of_document, options.vocab_size, options.replace_invalid
        ),
        part_bytes=options.part_mebibytes << 20,
        processes=options.processes,
    )


def _progress(stack: ExitStack, quiet: bool) -> Progress:
    """Return a bar on a terminal, a line per part elsewhere; nothing where it is to be quiet."""
    on_terminal = byte_bar.moves_cursor(sys.stderr, os.environ)
    if not (quiet or on_terminal):
        return Progress(begins=lambda size: None, reads=lambda size: None, made=_print_part)
    bar = stack.enter_context(ByteBar("read", 0, on_terminal=on_terminal, quiet=quiet))
    return Progress(begins=bar.expect, reads=bar.advance, made=lambda made, count: None)


def _print_part(made: Made, count: int) -> None:
    print(
        f"part {made.number + 1} of {count}: {made.documents} documents, {made.tokens} tokens",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
