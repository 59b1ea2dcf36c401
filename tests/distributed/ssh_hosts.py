"""Two real ssh hosts on loopback, for `deepspeed --hostfile`.

``SshHosts`` runs one sshd on 127.0.0.2 and one on 127.0.0.3, with keys and configuration of their
own in a temporary directory: neither the user's ~/.ssh nor the machine's sshd is read or touched.
DeepSpeed calls `ssh` by that name and pdsh does so, too; the program of that name in ``PATH`` here
adds the private configuration. Both hosts are this machine, so they share its file systems, as a
cluster's nodes do. It ends only what it started: its daemons, and what was run through them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests import daemons

HOSTS = ("127.0.0.2", "127.0.0.3")

_PROGRAMS = ("sshd", "ssh", "ssh-keygen", "pdsh")
_MARK = "EVERSTEP_TEST_HOSTS"  # in the environment of everything that runs on, or for, these hosts


def missing_programs() -> list[str]:
    """Name the programs that are needed and that this machine lacks."""
    return daemons.missing(_PROGRAMS)


class SshHosts:
    """Two hosts with one slot each; use as a context manager.

    Attributes:
        hostfile: for `deepspeed --hostfile`.
        environment: has a PATH where `ssh` and `pdsh` reach these hosts.
    """

    def __enter__(self) -> SshHosts:
        with contextlib.ExitStack() as stack:
            self.directory = Path(tempfile.mkdtemp(prefix="ssh-"))
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self._make_key("host_key")
            self._make_key("user_key")
            ports = {host: _free_port(host) for host in HOSTS}
            self._write_client_configuration(ports)
            self.hostfile = self.directory / "hostfile"
            self.hostfile.write_text("".join(f"{host} slots=1\n" for host in HOSTS))
            self.environment = os.environ | {
                "PATH": f"{self.directory / 'bin'}:{daemons.PATH}",
                "DS_ACCELERATOR": "cpu",
                _MARK: str(self.directory),
            }
            # A variable of the user's pdsh would lead elsewhere.
            for name in [name for name in self.environment if name.startswith(("PDSH_", "WCOLL"))]:
                del self.environment[name]
            stack.callback(daemons.kill_marked, _MARK, self.directory)
            for host, port in ports.items():
                self._start(stack, host, port)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.close()

    def deepspeed(
        self,
        *arguments: str,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        seconds: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run `deepspeed` over the hosts; return its exit code and all ranks' output.

        The master's address is given, because DeepSpeed 0.19.8 would take the first one of this
        machine's network cards.
        """
        port = _free_port(HOSTS[0])
        command = [sys.executable, "-m", "deepspeed.launcher.runner"]
        command += ["--hostfile", str(self.hostfile)]
        command += ["--master_addr", HOSTS[0], "--master_port", str(port), *arguments]
        return subprocess.run(
            command,
            env=self.environment | dict(environment or {}),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )

    def _make_key(self, name: str) -> None:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.directory / name], check=True
        )

    def _write_client_configuration(self, ports: Mapping[str, int]) -> None:
        host_key = (self.directory / "host_key.pub").read_text().strip()
        known = "".join(f"[{host}]:{port} {host_key}\n" for host, port in ports.items())
        (self.directory / "known_hosts").write_text(known)
        (self.directory / "ssh_config").write_text(
            f"IdentityFile {self.directory}/user_key\n"
            "IdentitiesOnly yes\n"
            "BatchMode yes\n"
            "LogLevel ERROR\n"
            f"UserKnownHostsFile {self.directory}/known_hosts\n"
            "StrictHostKeyChecking yes\n"
            + "".join(f"Host {host}\n  Port {port}\n" for host, port in ports.items())
        )
        shim = self.directory / "bin" / "ssh"
        shim.parent.mkdir()
        real = shlex.quote(daemons.find("ssh") or "ssh")
        shim.write_text(f'#!/bin/sh\nexec {real} -F {self.directory}/ssh_config "$@"\n')
        shim.chmod(0o755)

    def _start(self, stack: contextlib.ExitStack, host: str, port: int) -> None:
        if os.geteuid() == 0:
            # Where Debian's sshd confines itself; its service makes it, and has perhaps never run.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        configuration = self.directory / f"sshd_config.{host}"
        configuration.write_text(
            f"ListenAddress {host}:{port}\n"
            f"HostKey {self.directory}/host_key\n"
            f"AuthorizedKeysFile {self.directory}/user_key.pub\n"
            "PidFile none\n"
            "StrictModes no\n"
            "UsePAM no\n"
            "PasswordAuthentication no\n"
            "PermitRootLogin prohibit-password\n"
            # What a host's own profile would set: gloo otherwise wants the host's name to resolve.
            f"SetEnv {_MARK}={self.directory} GLOO_SOCKET_IFNAME=lo DS_ACCELERATOR=cpu"
            f" OMP_NUM_THREADS=1 EVERSTEP_TEST_HOST={host}\n"
        )
        # sshd wants its own absolute path: it runs itself anew for every connection.
        command = [daemons.find("sshd") or "sshd", "-D", "-e", "-f", str(configuration)]
        log = self.directory / f"sshd.{host}.log"
        with log.open("w") as output:
            daemon = daemons.start(stack, command, environment=os.environ, output=output)
        while not _listens(host, port):
            if daemon.poll() is not None:
                raise RuntimeError(f"sshd on {host}:{port} ended:\n{log.read_text()}")
            time.sleep(0.02)


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
