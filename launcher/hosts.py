"""The hosts of `launch=deepspeed`: which, how many ranks on each, and do they answer?

Reads the hostfile the way DeepSpeed 0.19.8 does, because the number of ranks has to be known before
anything starts. A host that does not answer would otherwise be found out by ranks that wait for it.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.errors import ConfigError, LauncherError
from launcher.launch_settings import DeepSpeedLaunch

_SSH_FAILED = 255
_CHECKS_AT_ONCE = 64


class HostError(LauncherError):
    """A host cannot be used now; it may be back when the same command is given again."""


def read(launch: DeepSpeedLaunch) -> dict[str, list[int]]:
    """Return the slots that are used on each host, in the hostfile's order.

    Raises:
        ConfigError: the file is not there or not a hostfile, or the selection leaves nothing.
    """
    path = Path(launch.hostfile).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"launch.hostfile={launch.hostfile}: {error.strerror}.") from error
    slots: dict[str, list[int]] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = re.match(r"(\S+)\s+slots=(\d+)", line)
        if match is None or match[1] in slots:
            raise ConfigError(
                f"{path}, line {number}: found {line!r}; wanted `HOST slots=N`, each host once."
            )
        slots[match[1]] = list(range(int(match[2])))
    return _select(slots, launch)


def check(hosts: Mapping[str, object], launch: DeepSpeedLaunch, directory: Path) -> None:
    """See that every host answers ssh, has this Python, and sees the directory. Blocks.

    Raises:
        HostError: names each host that does not, and what it said.
    """
    with ThreadPoolExecutor(_CHECKS_AT_ONCE) as pool:
        answers = list(pool.map(lambda host: _ask(host, launch, directory), hosts))
    wrong = [f"  {host}: {answer}" for host, answer in zip(hosts, answers, strict=True) if answer]
    if wrong:
        lines = "\n".join(wrong)
        raise HostError(
            f"{len(wrong)} of {len(answers)} hosts in {launch.hostfile} cannot be used:\n{lines}\n"
            "  Leave them out with launch.exclude=HOST, or mend them."
        )


def _ask(host: str, launch: DeepSpeedLaunch, directory: Path) -> str | None:
    """Return what is wrong with a host, or None."""
    seconds = launch.host_timeout_seconds
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(seconds))}"]
    if launch.ssh_port is not None:
        options += ["-p", str(launch.ssh_port)]
    python, place = shlex.quote(sys.executable), shlex.quote(str(directory))
    question = f"test -d {place} || exit 3; test -x {python} || exit 4"
    try:
        done = subprocess.run(
            ["ssh", *options, host, question],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + 10,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"does not answer within {seconds:g} s (launch.host_timeout_seconds)"
    except FileNotFoundError:
        return "there is no `ssh` here"
    said = done.stderr.strip().splitlines()
    if done.returncode == _SSH_FAILED:
        return f"does not answer: {said[-1] if said else 'ssh says nothing'}"
    return {
        0: None,
        3: f"does not see the directory {directory}",
        4: f"has no {sys.executable}",
    }.get(done.returncode, f"cannot run a command: exit code {done.returncode} {' '.join(said)}")


def _select(slots: Mapping[str, list[int]], launch: DeepSpeedLaunch) -> dict[str, list[int]]:
    if launch.nodes is not None:
        if launch.nodes > len(slots):
            raise ConfigError(
                f"launch.nodes={launch.nodes}: {launch.hostfile} has only {len(slots)} hosts."
            )
        return {host: slots[host] for host in list(slots)[: launch.nodes]}
    used = {host: list(numbers) for host, numbers in slots.items()}
    if launch.include is not None:
        wanted = _named(launch.include, slots, "include")
        used = {host: wanted[host] for host in slots if host in wanted}
    if launch.exclude is not None:
        for host, numbers in _named(launch.exclude, slots, "exclude").items():
            used[host] = [number for number in used[host] if number not in numbers]
    used = {host: numbers for host, numbers in used.items() if numbers}
    if not used:
        raise ConfigError(f"launch.hostfile={launch.hostfile}: no slot is left to start a rank on.")
    return used


def _named(text: str, slots: Mapping[str, list[int]], setting: str) -> dict[str, list[int]]:
    """Read DeepSpeed's `HOST@HOST:SLOT,SLOT`; a host alone means all of its slots."""
    found: dict[str, list[int]] = {}
    for part in text.split("@"):
        host, separator, numbers = part.partition(":")
        known = slots.get(host)
        chosen = [int(n) for n in numbers.split(",") if n.isdecimal()] if separator else known
        if known is None or not chosen or not set(chosen) <= set(known):
            raise ConfigError(
                f"launch.{setting}={text}: {part!r} is not a host of the hostfile with slots of "
                "its own. Wanted HOST, or HOST:0,2; several are joined by @."
            )
        found[host] = chosen
    return found
