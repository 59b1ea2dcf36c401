"""`everstep doctor [overrides]`: what this machine has, and what the overrides would do on it.

Starts nothing and writes nothing. What needs torch is asked of a process of its own, so that a
broken installation is a line of the report and not a traceback.

Exit codes: 0, or 78 where the run would be refused.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import requeue, start, versions
from launcher.config import Settings
from launcher.errors import ConfigError
from launcher.launch_settings import DeepSpeedLaunch, LocalLaunch, SlurmLaunch

_PROGRAMS = ("srun", "sbatch", "scontrol", "ssh", "pdsh", "c++", "ninja", "nvcc")
_PROBE_SECONDS = 300
_PROBE = """
import json, torch
found = {"devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}
found["cuda"] = torch.version.cuda
found["threads"] = torch.get_num_threads()
if found["devices"]:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
from deepspeed.git_version_info import installed_ops
found["prebuilt"] = [name for name, there in installed_ops.items() if there]
import os
root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
found["compiled"] = [d for path, _, files in os.walk(root) for d in [os.path.basename(path)]
                     if f"{d}.so" in files]
print(json.dumps(found))
"""


def main(arguments: Sequence[str]) -> int:
    """Print the report; return the exit code."""
    probe = _probe()
    _print("here", _machine(probe, os.environ))
    from launcher import train

    composed = train.compose(arguments, os.environ)
    if composed is None:
        return requeue.DONE
    if isinstance(composed, ConfigError):
        print(f"refused\n  {composed}")
        return requeue.BAD_CONFIG
    _print("places", _places(composed))
    _print("DeepSpeed's extensions", _extensions(composed, probe))
    try:
        lines = list(_plan(composed, os.environ))
        start.check(composed, start.ranks_of(composed, os.environ))
    except ConfigError as error:
        print(f"refused\n  {error}")
        return requeue.BAD_CONFIG
    _print("what would happen", lines)
    return requeue.DONE


def _probe() -> dict[str, Any]:
    """Ask torch and DeepSpeed; under `error`, why they cannot be asked."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch takes more than {_PROBE_SECONDS} s"}
    except (IndexError, json.JSONDecodeError):
        said = done.stderr.strip().splitlines()
        return {"error": said[-1] if said else f"exit code {done.returncode}"}
    return found


def _machine(probe: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[str]:
    yield "versions: " + ", ".join(f"{name} {v}" for name, v in versions.installed().items())
    if "error" in probe:
        yield f"torch or DeepSpeed cannot be used: {probe['error']}"
    elif probe["devices"]:
        kinds = {name: probe["devices"].count(name) for name in probe["devices"]}
        named = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        yield f"accelerators: {named}; CUDA {probe['cuda']}, NCCL {probe['nccl']}"
    else:
        yield f"accelerators: none, so ranks run on the CPU; {os.cpu_count()} cores"
    name = socket.gethostname()
    yield f"host: {name}, {_address(name)}"
    interfaces = {n: environ[n] for n in environ if n.endswith("_SOCKET_IFNAME")}
    for variable, value in sorted(interfaces.items()):
        yield f"interface: {variable}={value}"
    yield f"memory: {_available_memory() / 1e9:.1f} GB available"
    found = [program for program in _PROGRAMS if shutil.which(program)]
    yield f"programs: {', '.join(found) or 'none'} (of {', '.join(_PROGRAMS)})"
    if job := environ.get("SLURM_JOB_ID"):
        yield f"in Slurm job {job}, {environ.get('SLURM_JOB_NUM_NODES', '?')} nodes"


def _places(settings: Settings) -> Iterator[str]:
    directory = Path(settings.checkpoint.dir)
    place = next(p for p in (directory, *directory.parents) if p.exists())
    yield f"run.dir: {settings.run.dir}"
    yield f"checkpoint.dir: {directory}, {shutil.disk_usage(place).free / 1e9:.1f} GB free"
    if not os.access(place, os.W_OK):
        yield f"{place} is not writable"


def _extensions(settings: Settings, probe: Mapping[str, Any]) -> Iterator[str]:
    """What of DeepSpeed's own C++ the settings use, and whether it is compiled."""
    zero = settings.deepspeed["zero_optimization"]
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    needed = ["cpu_adam"] if offloads else []
    if settings.optimizer.params.get("torch_adam") is False and not offloads:
        needed.append("fused_adam")
    if not needed:
        yield "none are needed"
    for name in needed:
        if name in probe.get("prebuilt", ()):
            yield f"{name}: built at installation"
        elif name in probe.get("compiled", ()):
            yield f"{name}: compiled before"
        else:
            yield f"{name}: will be compiled on first use, which takes a minute and a compiler"


def _plan(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    launch, batch = settings.launch, settings.batch
    ranks = start.ranks_of(settings, environ)
    if isinstance(launch, LocalLaunch):
        yield f"{ranks} ranks would be started on this machine, meeting on 127.0.0.1"
    elif isinstance(launch, DeepSpeedLaunch):
        address = launch.master_addr or "the first host's first address"
        yield f"{ranks} ranks would be started over ssh, meeting on {address}"
    elif isinstance(launch, SlurmLaunch):
        yield f"a job of {launch.nodes} nodes with {launch.ranks_per_node} ranks each: submitted"
    else:
        yield f"{ranks} ranks would be started in this Slurm allocation"
    micro_steps = settings.accumulation_steps(ranks)
    yield (
        f"{batch.global_size} samples a step = {batch.micro_size} a micro batch x {micro_steps} "
        f"micro steps x {ranks} ranks"
    )
    tags = sorted(
        (int(path.name.removeprefix("global_step")), path.name)
        for path in Path(settings.checkpoint.dir).glob("global_step*")
        if path.name.removeprefix("global_step").isdecimal()
    )
    newest = f"the newest checkpoint is {tags[-1][1]}" if tags else "there is no checkpoint"
    yield f"resume={settings.resume}: {newest}; train.steps={settings.train.steps}"


def _print(title: str, lines: Iterator[str] | Sequence[str]) -> None:
    print(title)
    for line in lines:
        print(f"  {line}")


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return "a name that does not resolve"


def _available_memory() -> int:
    """Return bytes that new processes can have. Two images a rank are taken from it."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kilobytes) * 1024
