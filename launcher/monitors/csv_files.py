"""A CSV file for each figure, laid out like those of DeepSpeed's monitor: `step,loss`.

Unlike there a file has one heading, and a step that was taken back is no longer in it.
"""

from pathlib import Path
from typing import TextIO

from launcher.monitors import settings
from launcher.monitors.point import Point


class CsvFiles:
    """A monitor; see `launcher.monitors.point`."""

    name = settings.CSV

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, TextIO] = {}

    def open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    def go_back(self, step: int) -> None:
        self.close()
        for path in self.directory.glob("train_*.csv"):
            _cut(path, step)

    def write(self, point: Point) -> None:
        for name, value in point.figures.items():
            file = self._files.get(name)
            if file is None:
                path = self.directory / f"{name.replace('/', '_')}.csv"
                file = self._files[name] = path.open("a", encoding="ascii")
                if file.tell() == 0:
                    file.write(f"step,{name.rpartition('/')[2]}\n")
            file.write(f"{point.step},{value!r}\n")

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        while self._files:
            _, file = self._files.popitem()
            file.close()


def _cut(path: Path, step: int) -> None:
    """Drop the rows after a step, and one that was left unfinished; steps ascend."""
    with path.open("r+b") as file:
        heading = file.readline()
        end = len(heading) if heading.endswith(b"\n") else 0
        for line in file:
            number = line.partition(b",")[0]
            if not (line.endswith(b"\n") and number.isdigit() and int(number) <= step):
                break
            end += len(line)
        file.truncate(end)
