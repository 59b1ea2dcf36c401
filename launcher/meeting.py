"""Where do the ranks of a start meet? Agreed by a file, so that a port in use costs nothing.

A port that is named before anybody listens there may be taken by then. Where the start has a name
that no other has, rank 0 takes any port that is free and writes the number into the run directory;
the others wait for that file. Under plain `deepspeed` and torchrun a start has no such name, and
the port is the one that they were given.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

_LOOK_EVERY_SECONDS = 0.2


def place_of(environ: Mapping[str, str], run_directory: Path) -> Path | None:
    """Return the file by which this start's ranks agree, or None where the start has no name.

    A step of a Slurm job is one start; a requeued job begins again with step 0. A port that the
    user has set stays.
    """
    if link := environ.get("EVERSTEP_LINK"):
        return Path(link) / "meeting"
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
    if {"RANK", "MASTER_PORT"} & environ.keys() or not environ.keys() >= set(names):
        return None
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    start = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}.{restart}"
    return run_directory / f".meeting.{start}"


def listen() -> socket.socket:
    """Take a free port on all interfaces; the socket is to be handed to the store."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("", 0))
    listener.listen(1024)
    return listener


def publish(place: Path, port: int) -> None:
    """On rank 0: tell the others the port."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f"{place.name}.part")
    part.write_text(json.dumps({"port": port}), encoding="ascii")
    part.replace(place)


def find(place: Path, timeout_seconds: float) -> int | None:
    """On the other ranks: wait for the port. None if rank 0 does not tell it in time."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        # A listing: network clients remember for long that a single name was not there.
        if place.parent.is_dir() and place.name in os.listdir(place.parent):
            port: int = json.loads(place.read_text(encoding="ascii"))["port"]
            return port
        time.sleep(_LOOK_EVERY_SECONDS)
    return None
