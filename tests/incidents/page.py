"""docs/incidents.md, taken apart, so that what it quotes is looked for and what it says is done."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "incidents.md"
PARTS = ("Looks like", "By itself", "To do")

# In a quote these stand for whatever there is: numbers, a host, a step, a path, what is left out.
_PLACEHOLDERS = {
    r"node\d+": r"\S+",
    r"\d+": r"\d+",
    r"\bN\b": r"\S+",
    r"runs/NAME": r"\S*runs/NAME",
    r"\.\.\.": ".*",
}
SETTING = re.compile(r"(?:batch|checkpoint|data|guard|launch|model|resume|run)\.[a-z_]+")
_SHOWN = 8000


@dataclass(frozen=True)
class Incident:
    """One section: its title, and the text of each of its PARTS."""

    title: str
    parts: dict[str, str]

    def quotes(self) -> list[str]:
        """Return what the incident is said to look like, in the words of the system."""
        code = _code(self.parts["Looks like"])
        return [quote for quote in code if not SETTING.fullmatch(quote)]

    def commands(self, program: str) -> list[str]:
        """Return the command lines of `program` that are to be given, as they stand there."""
        lines = [line for code in _code(self.parts["To do"]) for line in code.splitlines()]
        return [line.partition("#")[0].strip() for line in lines if line.split()[0] == program]

    def command(self, program: str, **instead: str) -> str:
        """Return the one command line of `program`, with words of it replaced."""
        (line,) = self.commands(program)
        for word, other in instead.items():
            assert word in line, f"{self.title}: {line}"
            line = line.replace(word, other)
        return line

    def assert_seen(self, evidence: str) -> None:
        """See that everything that the page quotes, and each exit code, is in the evidence."""
        wanted = {quote: _pattern(quote) for quote in self.quotes()}
        for code in re.findall(r"exit\s+code (\d+)", self.parts["Looks like"]):
            wanted[f"exit code {code}"] = rf"exit code {code}\b"
        assert wanted, self.title
        for quote, pattern in wanted.items():
            assert re.search(pattern, evidence), (
                f"{self.title}: the page says {quote!r}, and nothing like it was seen:\n"
                f"{evidence[:_SHOWN]}"
            )


def incidents() -> dict[str, Incident]:
    """Return all sections, by title."""
    _, *sections = re.split(r"(?m)^## ", DOCUMENT.read_text(encoding="utf-8"))
    return {section.partition("\n")[0]: _section(section) for section in sections}


def incident(title: str) -> Incident:
    return incidents()[title]


def _section(text: str) -> Incident:
    title, _, body = text.partition("\n")
    _, *found = re.split(r"(?m)^\*(" + "|".join(PARTS) + r")\*[:,]", body)
    return Incident(title, dict(zip(found[::2], found[1::2], strict=True)))


def _code(text: str) -> list[str]:
    """Return fenced blocks and code spans, in order."""
    found = re.findall(r"^```\n(.*?)^```$|`([^`]+)`", text, re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) or block.rstrip("\n") for block, span in found]


def _pattern(quote: str) -> str:
    """Return a pattern of a quote; white space is any, since pages and logs break their lines."""
    pieces = re.split("(" + "|".join(_PLACEHOLDERS) + ")", quote)
    for index, piece in enumerate(pieces):
        kind = next((p for p in _PLACEHOLDERS if re.fullmatch(p, piece)), None)
        literal = r"\s+".join(re.escape(word) for word in re.split(r"\s+", piece))
        pieces[index] = literal if kind is None else _PLACEHOLDERS[kind]
    return "".join(pieces)
