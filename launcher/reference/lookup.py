"""`everstep settings [WORD ...]`: the settings whose name or meaning has these words.

Without a word it prints the whole page, which is how docs/settings.md is made. Needs no torch. Exit
codes: 0 something was printed, 2 no setting has these words, 78 a file of `conf/` cannot be read.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence

from launcher import explain, requeue
from launcher.errors import nearest
from launcher.reference.entries import Entry, Preset, Section, sections
from launcher.reference.page import markdown

EXIT_USAGE = 2

_WIDTH = 88


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="everstep settings",
        description="Look up settings by words of their names or meanings; all of them without.",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="such as lease, or checkpoint.")
    words = [word.lower() for word in parser.parse_args(arguments).words]
    try:
        everything = sections()
    except explain.COMPOSE_ERRORS as error:
        print(f"everstep: {explain.explain(error)}", file=sys.stderr)
        return requeue.BAD_CONFIG
    if not words:
        sys.stdout.write(markdown())
        return 0
    found = [line for section in everything for line in _found_in(section, words)]
    if not found:
        names = [entry.name for section in everything for entry in section.entries]
        hint = nearest(words[0], {part for name in names for part in (name, *name.split("."))})
        print(f"everstep: no setting has {' and '.join(words)}. {hint}", file=sys.stderr)
        return EXIT_USAGE
    print("\n".join(found).replace("`", ""))
    return 0


def _found_in(section: Section, words: Sequence[str]) -> Iterator[str]:
    choice = section.title if "=" in section.title else ""
    for entry in section.entries:
        if _has(f"{choice} {entry.name} {entry.meaning}", words):
            yield from _lines_of(entry, choice)
    for preset in section.presets:
        if _has(f"{preset.name} {preset.about}", words):
            yield from _lines_of_preset(preset)


def _has(text: str, words: Sequence[str]) -> bool:
    return all(word in text.lower() for word in words)


def _lines_of(entry: Entry, choice: str) -> Iterator[str]:
    of = ", ".join(f"data={name}" for name in entry.of) or choice
    default = "must be given" if entry.default == "" else f"default {entry.default}"
    facts = [f"with {of}" if of else "", entry.type, default if entry.default is not None else ""]
    yield f"{entry.name}  ({'; '.join(filter(None, facts))})"
    yield from textwrap.wrap(entry.meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _lines_of_preset(preset: Preset) -> Iterator[str]:
    yield preset.name
    for text in (preset.about, f"Sets {', '.join(preset.sets)}." if preset.sets else ""):
        yield from textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
