"""Which rank a process is, from the environments that real starters make."""

from __future__ import annotations

import pytest

from launcher import overrides, topology
from launcher.errors import ConfigError
from launcher.topology import Topology

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}
DEEPSPEED = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_SIZE": "1",
    "CROSS_RANK": "2",
    "CROSS_SIZE": "3",
    "MASTER_ADDR": "127.0.0.2",
    "MASTER_PORT": "29500",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
SRUN = BATCH_SHELL | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}


def test_torchrun_numbers_the_rank() -> None:
    assert topology.detect(TORCHRUN) == Topology(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        started_by="torchrun",
        master_addr="10.0.0.1",
        master_port=29400,
    )


def test_deepspeed_says_local_size_and_cross_rank_instead() -> None:
    place = topology.detect(DEEPSPEED)
    assert place is not None
    assert (place.rank, place.local_world_size) == (2, 1)
    assert place.started_by == "deepspeed"


def test_srun_numbers_the_rank_by_its_step_not_by_the_job() -> None:
    place = topology.detect(SRUN)
    assert place is not None
    assert (place.rank, place.world_size) == (2, 3)
    assert (place.local_rank, place.local_world_size) == (0, 1)
    assert place.started_by == "srun"
    assert place.master_node == "n2"
    assert place.master_addr is None


def test_all_ranks_of_a_step_derive_one_port_and_a_restart_another() -> None:
    ports = set()
    for rank in range(3):
        place = topology.detect(SRUN | {"SLURM_PROCID": str(rank)})
        assert place is not None
        ports.add(place.master_port)
    assert len(ports) == 1
    again = topology.detect(SRUN | {"SLURM_RESTART_COUNT": "1"})
    assert again is not None
    assert again.master_port not in ports
    assert 1024 <= again.master_port < 32768


def test_a_master_address_in_the_environment_wins_over_slurms_node_list() -> None:
    place = topology.detect(SRUN | {"MASTER_ADDR": "10.9.8.7", "MASTER_PORT": "4321"})
    assert place is not None
    assert (place.master_addr, place.master_port, place.master_node) == ("10.9.8.7", 4321, None)


def test_ranks_that_torchrun_starts_inside_srun_are_torchruns() -> None:
    place = topology.detect(SRUN | TORCHRUN)
    assert place is not None
    assert place.started_by == "torchrun"
    assert place.rank == 3


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="a shell"),
        pytest.param(BATCH_SHELL, id="the batch script, which has a task number all the same"),
        pytest.param(SRUN | {"SLURM_STEP_ID": "4294967290"}, id="an interactive step"),
        pytest.param(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, id="a step of one task"),
        pytest.param(
            {"WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
            id="a batch script that exports WORLD_SIZE for others",
        ),
    ],
)
def test_a_process_that_nobody_numbered_is_a_starter(environ: dict[str, str]) -> None:
    assert topology.detect(environ) is None


def test_a_step_of_one_task_is_a_rank_where_our_own_srun_made_it() -> None:
    environ = SRUN | {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "EVERSTEP_STARTED_BY": "srun",
    }
    place = topology.detect(environ)
    assert place is not None
    assert (place.rank, place.world_size) == (0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_SIZE is not set"),
        ({"RANK": "4"}, "rank=4 of world_size=4"),
        ({"LOCAL_RANK": "-1"}, "local_rank=-1 of local_world_size=2"),
        ({"RANK": "two"}, "RANK='two'"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, "more than world_size=1"),
    ],
)
def test_half_a_set_of_variables_is_an_error(change: dict[str, str | None], message: str) -> None:
    merged: dict[str, str | None] = {**TORCHRUN, **change}
    with pytest.raises(ConfigError, match=message):
        topology.detect({name: value for name, value in merged.items() if value is not None})


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_mpi_does_not_become_many_worlds_of_one_rank(name: str) -> None:
    with pytest.raises(ConfigError, match="world of its own"):
        topology.detect({name: "4"})


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("n1", "n1"),
        ("n[2-3]", "n2"),
        ("gpu[007-012,020],m3", "gpu007"),
        ("rack1-n[3,5]-ib", "rack1-n3-ib"),
        ("login,n[1-4]", "login"),
    ],
)
def test_the_first_node_of_a_slurm_list(node_list: str, first: str) -> None:
    assert topology.first_node(node_list) == first


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2,1(x3)", [2, 1, 1, 1]), ("8(x2),4", [8, 8, 4])]
)
def test_tasks_per_node_are_run_length_coded(text: str, counts: list[int]) -> None:
    assert [topology.tasks_on_node(text, node) for node in range(len(counts))] == counts
    with pytest.raises(ConfigError, match=f"SLURM_NODEID={len(counts)}"):
        topology.tasks_on_node(text, len(counts))


@pytest.mark.parametrize(
    "arguments", [["--local_rank=1", "seed=3"], ["seed=3", "--local_rank", "1"]]
)
def test_deepspeeds_local_rank_argument_is_taken_out_and_checked(arguments: list[str]) -> None:
    rest, local_rank = overrides.split_local_rank(arguments)
    assert (rest, local_rank) == (["seed=3"], 1)
    place = topology.detect(TORCHRUN)
    topology.check_local_rank(1, place)
    with pytest.raises(ConfigError, match=r"--local_rank=0 was given.*local_rank=1"):
        topology.check_local_rank(0, place)
    with pytest.raises(ConfigError, match="RANK and LOCAL_RANK are not set"):
        topology.check_local_rank(1, None)


def test_a_local_rank_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="wanted a whole number"):
        overrides.split_local_rank(["--local_rank"])
