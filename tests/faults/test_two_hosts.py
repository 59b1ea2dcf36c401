"""The driver's chains where every attempt sees the directory by another mount than the one before,
and each rank of an attempt by another one than its neighbour.
"""

import os
from pathlib import Path

import pytest

from tests.faults.two_hosts import two_views, why_not
from tests.protocol.driver.chain import Chain

if reason := why_not():
    pytest.skip(f"two caching mounts: {reason}", allow_module_level=True)


def test_a_mount_goes_on_believing_what_it_has_seen(tmp_path: Path) -> None:
    """Or the tests below would show nothing."""
    with two_views(tmp_path) as (_, (here, there)):
        assert not os.path.exists(f"{here}/name")
        Path(there, "name").touch()
        assert not os.path.exists(f"{here}/name"), "the absence of a name must be cached"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("attempts", "zombies"), [(20, False), (10, True)])
def test_attempts_on_two_hosts_lose_and_mix_nothing(
    tmp_path: Path, attempts: int, zombies: bool
) -> None:
    with two_views(tmp_path) as (real, views):
        figures = Chain(str(real), 20260131, zombies, views).run(attempts)
    print(vars(figures))
    assert figures.attempts == attempts
    assert figures.saves_promised > 0
    assert figures.tags_verified > 0
    assert figures.writers_left == 0
