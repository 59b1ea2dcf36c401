"""docs/settings.md: every setting in tables. `make docs` writes it; a test compares it."""

from collections.abc import Iterable, Iterator, Sequence

from launcher import deepspeed_section
from launcher.reference.entries import Entry, Preset, Section, sections

_HEAD = """\
# Settings

Everything that can be set. A setting is given on the command line as `name=value`, or has its value
in a file of `conf/`; a choice such as `data=megatron` sets several at once. `null` leaves a setting
unset; `${run.dir}` stands for the value of another one. A name that `conf/` does not have yet is
added with a plus, `+optimizer.params.amsgrad=true`; under `deepspeed` it needs none.

`everstep settings WORD` looks something up here, and `everstep [overrides] --cfg job` prints what a
command line comes to.

<!-- Made by `make docs` from the classes in launcher/ and the comments in conf/. -->
"""


def markdown() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_contents(), "", *(line for one in sections() for line in _of(one))])


def _contents() -> Iterator[str]:
    for section in sections():
        indent = "  " if _is_inner(section) else ""
        anchor = "".join(c for c in section.title.lower() if c.isalnum() or c in " _-")
        yield f"{indent}- [{section.title}](#{anchor.replace(' ', '-')})"


def _of(section: Section) -> Iterator[str]:
    yield f"{'###' if _is_inner(section) else '##'} {section.title}"
    yield ""
    if section.about:
        yield from (section.about, "")
    if section.title == "deepspeed":
        yield from (*_deepspeed(), "")
    if section.entries:
        yield from (*_table(section.entries), "")
    if section.presets:
        rows = [(f"`{one.name}`", one.about, _sets(one)) for one in section.presets]
        yield from (*_rows(("choice", "means", "sets"), rows), "")


def _is_inner(section: Section) -> bool:
    return "=" in section.title or "." in section.title


def _table(entries: Sequence[Entry]) -> Iterator[str]:
    columns = {
        "setting": [f"`{one.name}`" for one in entries],
        "type": [one.type for one in entries],
        "default": [_default(one) for one in entries],
        "means": [one.meaning for one in entries],
        "of `data=`": [", ".join(one.of) for one in entries],
    }
    used = {name: cells for name, cells in columns.items() if any(cells)}
    return _rows(tuple(used), zip(*used.values(), strict=True))


def _default(entry: Entry) -> str:
    if entry.default is None:
        return ""
    return f"`{entry.default}`" if entry.default else "must be given"


def _sets(preset: Preset) -> str:
    return ", ".join(f"`{setting}`" for setting in preset.sets) or "what is chosen by default"


def _deepspeed() -> Iterator[str]:
    section = deepspeed_section
    known = section.KNOWN_KEYS - set(section.REFUSED_KEYS)
    yield (
        f"These keys of DeepSpeed {section.KEYS_OF_VERSION}, with what is below them, can be given "
        f"on the command line or in `conf/deepspeed/`: {', '.join(map(_code, sorted(known)))}."
    )
    yield ""
    derived = [(_code(key), instead) for key, instead in section.DERIVED_KEYS.items()]
    yield from _rows(("derived, and refused here", "set instead"), derived)
    yield ""
    refused = [(_code(key), why) for key, why in section.REFUSED_KEYS.items()]
    refused += [
        (_code(f"zero_optimization.{path}"), why) for path, _, why in section.REFUSED_OF_ZERO
    ]
    yield from _rows(("refused", "why"), refused)


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(text: str) -> str:
    return f"`{text}`"
