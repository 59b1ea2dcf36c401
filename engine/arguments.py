"""The command line of `python -m engine`: commands and their options, nothing else."""

import argparse


def parser() -> argparse.ArgumentParser:
    """Return the parser; `command` of what it parses is the command's name."""
    whole = argparse.ArgumentParser(prog="python -m engine", description="Look at checkpoints.")
    commands = whole.add_subparsers(required=True, dest="command", metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "dir", metavar="DIR", help="a run, a checkpoints or a checkpoint's directory"
        )
        return command

    ls = add("ls", "List the checkpoints.")
    ls.add_argument("--strays", action="store_true", help="list those off the line of history too")
    show = add("show", "Describe one checkpoint; the newest unless --tag is given.")
    show.add_argument("--tag", help="global_step<number>, or the name of a stray")
    show.add_argument("--json", action="store_true", help="print the whole manifest as JSON")
    verify = add("verify", "Read every byte of the newest checkpoint; name all damage.")
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--tag", help="verify this one: global_step<number> or a stray's name")
    which.add_argument("--all", action="store_true", help="verify all that are committed")
    verify.add_argument(
        "--strays", action="store_true", help="with --all: those off the line of history, too"
    )
    verify.add_argument("--json", action="store_true", help="what was found, for programs")
    stream = add("stream", "Say which samples made a step's batch, and what they are.")
    what = stream.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, help="the step, as in metrics.jsonl")
    what.add_argument("--sample", type=int, help="one sample offset; its text is printed whole")
    stream.add_argument("--tag", help="by this checkpoint's record; the newest unless given")
    stream.add_argument("--tokenizer", metavar="FILE", help="a tokenizers JSON file, to decode by")
    diff = add("diff", "Say which weights moved between two checkpoints, and how far.")
    diff.add_argument("before", metavar="TAG", help="the earlier one: global_step<number>")
    diff.add_argument("after", metavar="TAG", help="the later one")
    diff.add_argument("--top", type=_count, metavar="N", help="show the N that moved most")
    diff.add_argument("--json", action="store_true", help="all of it, for programs")
    diff.add_argument(
        "--verify", default="full", choices=("full", "size"), help="compare digests, or sizes only"
    )
    export = add("export", "Write a checkpoint's weights for from_pretrained.")
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
    importing.add_argument("dir", metavar="SRC", help="what save_checkpoint was given")
    importing.add_argument("--out", required=True, metavar="DIR", help="the checkpoints directory")
    importing.add_argument("--tag", help="the one to import; what `latest` names unless given")
    importing.add_argument(
        "--sample-offset", type=int, metavar="N", help="samples used; else DeepSpeed's own count"
    )
    importing.add_argument(
        "--optimizer", metavar="CLASS", help="its qualified name; else by DeepSpeed's configuration"
    )
    for command in (verify, diff, export, importing):
        command.add_argument("-q", "--quiet", action="store_true", help="show no progress")
    return whole


def _count(text: str) -> int:
    """Return a number of rows that the command line gives."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: wanted a number from 1")
    return int(text)
