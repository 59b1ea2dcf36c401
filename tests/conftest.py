"""What tests of several packages start once for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed import ssh_hosts as hosts


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[hosts.SshHosts]:
    """Two hosts on loopback that answer ssh."""
    if missing := hosts.missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)} (tests/install_system_packages.sh)")
    with hosts.SshHosts() as running:
        yield running
