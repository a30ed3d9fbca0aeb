"""Every launcher's environment means one Role, and a wrong one is one clear error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.env.environment import expand_hosts
from phalanx.cluster.role.mpi_srun_role import PORT_BASE, PORT_SPAN, derived_port
from phalanx.cluster.role.role import Role
from phalanx.errors import RoleError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OURS = {f"PHALANX_{k}": v for k, v in TORCHRUN.items()}
FLEET = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.2:6170",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6170",
}
SERVERS = FLEET | {"PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.3:1,10.0.0.4:1", "TRAINING_ROLE": "TRAINER"}
SERVER = SERVERS | {"TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.4", "PADDLE_PORT": "1"}
for _name in ("PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT"):
    del SERVER[_name]
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_PROCID": "3", "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[08-10]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "PMIX_NAMESPACE": "prterun-1",
}  # fmt: skip


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {k: v for k, v in env.items() if k not in names}


def test_an_empty_environment_is_a_job_of_one():
    assert Role.detect({}) == Role()
    assert (Role().world_size, Role().launcher, Role().is_worker) == (1, "none", True)


@pytest.mark.parametrize(
    ("env", "launcher", "rank", "world", "master"),
    [
        (TORCHRUN, "torchrun", 1, 2, ("10.0.0.1", 29500)),
        (OURS, "phalanx", 1, 2, ("10.0.0.1", 29500)),
        (OURS | TORCHRUN | FLEET, "phalanx", 1, 2, ("10.0.0.1", 29500)),
        (TORCHRUN | FLEET, "torchrun", 1, 2, ("10.0.0.1", 29500)),
        (FLEET, "fleet", 1, 2, ("10.0.0.1", 6170)),
        (FLEET | {"PADDLE_GLOO_HTTP_ENDPOINT": "10.0.0.9:80"}, "fleet", 1, 2, ("10.0.0.9", 80)),
        (SRUN, "slurm", 3, 5, ("gpu08", derived_port("77.0"))),
        (SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}, "slurm", 3, 5, ("a", 5)),
        (TORCHRUN | SRUN, "torchrun", 1, 2, ("10.0.0.1", 29500)),
        (MPIRUN, "mpi", 3, 4, ("10.0.0.1", derived_port("prterun-1"))),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "mpi", 0, 1, ("", 0)),
        ({"WORLD_SIZE": "1"}, "torchrun", 0, 1, ("", 0)),
        ({"RANK": "", "WORLD_SIZE": " "}, "none", 0, 1, ("", 0)),
    ],
)
def test_each_launcher_is_understood(env, launcher, rank, world, master):
    role = Role.detect(env)
    assert (role.launcher, role.rank, role.world_size) == (launcher, rank, world)
    assert (role.master_addr, role.master_port) == master


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2"},  # sbatch script
        SRUN | {"SLURM_STEP_ID": "4294967290"},  # interactive step of salloc
        {"PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_an_allocation_says_nothing_about_this_process(env):
    assert Role.detect(env) == Role()


def test_places_on_hosts_are_read_or_inferred():
    slurm = Role.detect(SRUN)
    assert (slurm.local_rank, slurm.local_world_size, slurm.node_rank, slurm.node_count) == (1, 2, 1, 3)
    mpi = Role.detect(MPIRUN)
    assert (mpi.local_rank, mpi.local_world_size, mpi.node_rank, mpi.node_count) == (1, 2, 1, 2)
    alone = Role.detect(TORCHRUN | {"MASTER_ADDR": "127.0.0.1"})
    assert (alone.local_rank, alone.local_world_size, alone.node_count) == (1, 2, 1)
    apart = Role.detect(TORCHRUN)
    assert (apart.local_rank, apart.local_world_size, apart.node_rank, apart.node_count) == (0, 1, 1, 2)
    fleet = Role.detect(FLEET)
    assert (fleet.local_rank, fleet.node_rank, fleet.node_count) == (0, 1, 2)


def test_servers_and_heterogeneous_workers_count_their_own_kind():
    server = Role.detect(SERVER)
    assert (server.kind, server.rank, server.world_size, server.endpoint) == ("server", 1, 2, "10.0.0.4:1")
    assert (server.is_server, server.worker_num) == (True, 2)
    worker = Role.detect(SERVERS)
    assert (worker.kind, worker.rank, worker.server_endpoints) == ("worker", 1, ("10.0.0.3:1", "10.0.0.4:1"))
    heter = Role.detect(
        SERVERS
        | {"TRAINING_ROLE": "HETER_TRAINER", "PADDLE_TRAINER_ID": "0", "PADDLE_CURRENT_ENDPOINT": "h:1"}
        | {"PADDLE_HETER_TRAINER_IP_PORT_LIST": "h:1"}
    )
    assert (heter.kind, heter.rank, heter.world_size, heter.worker_num) == ("heter_worker", 0, 1, 2)


def test_our_launchers_server_counts_servers_while_fleets_words_count_trainers():
    env = {"PHALANX_ROLE": "SERVER", "PHALANX_RANK": "0", "PHALANX_WORLD_SIZE": "1", "TRAINING_ROLE": "PSERVER"}
    env |= {"PADDLE_TRAINERS_NUM": "2", "RANK": "0", "WORLD_SIZE": "1", "PHALANX_SERVER_ENDPOINTS": "a:1"}
    role = Role.detect(env)
    assert (role.kind, role.world_size, role.endpoint) == ("server", 1, "a:1")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (OURS | {"RANK": "0"}, "PHALANX_RANK=1 and RANK=0 disagree"),
        (TORCHRUN | {"PADDLE_TRAINERS_NUM": "3"}, "WORLD_SIZE=2 and PADDLE_TRAINERS_NUM=3 disagree"),
        (OURS | {"MASTER_PORT": "1"}, "PHALANX_MASTER_PORT=29500 and MASTER_PORT=1 disagree"),
        (
            OURS | {"PHALANX_ROLE": "SERVER", "TRAINING_ROLE": "TRAINER"},
            "PHALANX_ROLE=SERVER and TRAINING_ROLE=TRAINER",
        ),
        (TORCHRUN | {"RANK": "two"}, "RANK must be an integer, found 'two'"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE must be at least 1, found 0"),
        (TORCHRUN | {"RANK": "-1"}, "RANK must be at least 0, found -1"),
        (TORCHRUN | {"RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2: ranks run from 0 to 1"),
        (TORCHRUN | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=3 does not fit LOCAL_WORLD_SIZE=2"),
        (without(TORCHRUN, "MASTER_PORT"), "WORLD_SIZE=2 needs MASTER_PORT, which is not set"),
        (without(TORCHRUN, "MASTER_ADDR"), "WORLD_SIZE=2 needs MASTER_ADDR, which is not set"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT must be a port between 1 and 65535, found 70000"),
        (without(TORCHRUN, "WORLD_SIZE"), "RANK=1 needs WORLD_SIZE, which is not set"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE=2 needs RANK, which is not set"),
        (without(OURS, "PHALANX_RANK"), "PHALANX_WORLD_SIZE=2 needs PHALANX_RANK"),
        (OURS | {"PHALANX_ROLE": "WORKR"}, "PHALANX_ROLE must be one of .*found 'WORKR'. Did you mean 'WORKER'"),
        (FLEET | {"TRAINING_ROLE": "SERVER!"}, "TRAINING_ROLE must be one of TRAINER, PSERVER, HETER_TRAINER"),
        (without(FLEET, "PADDLE_TRAINERS_NUM"), "needs PADDLE_TRAINERS_NUM"),
        (without(FLEET, "PADDLE_TRAINER_ID"), "needs PADDLE_TRAINER_ID"),
        (FLEET | {"PADDLE_TRAINER_ENDPOINTS": "a:1"}, "PADDLE_TRAINERS_NUM=2, but PADDLE_TRAINER_ENDPOINTS lists 1"),
        (FLEET | {"PADDLE_TRAINER_ENDPOINTS": "a:1,b"}, "PADDLE_TRAINER_ENDPOINTS must list host:port.*found 'b'"),
        (FLEET | {"PADDLE_CURRENT_ENDPOINT": "z:1"}, "PADDLE_CURRENT_ENDPOINT=z:1 is not entry PADDLE_TRAINER_ID=1"),
        (FLEET | {"PADDLE_TRAINER_ID": "5"}, "PADDLE_TRAINER_ID=5 does not fit PADDLE_TRAINERS_NUM=2"),
        (without(SERVERS, "TRAINING_ROLE"), "parameter servers.*needs TRAINING_ROLE"),
        (without(SERVERS, "PADDLE_TRAINERS_NUM"), "TRAINING_ROLE=TRAINER needs PADDLE_TRAINERS_NUM"),
        (without(SERVER, "POD_IP"), "TRAINING_ROLE=PSERVER needs POD_IP"),
        (without(SERVER, "PADDLE_PORT"), "TRAINING_ROLE=PSERVER needs PADDLE_PORT"),
        (without(SERVER, "PADDLE_PSERVERS_IP_PORT_LIST"), "TRAINING_ROLE=PSERVER needs PADDLE_PSERVERS_IP_PORT_LIST"),
        (SERVER | {"PADDLE_PORT": "9"}, "POD_IP:PADDLE_PORT=10.0.0.4:9 is not in PADDLE_PSERVERS_IP_PORT_LIST"),
        (SRUN | {"SLURM_PROCID": "5"}, "SLURM_PROCID=5 does not fit SLURM_STEP_NUM_TASKS=5"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "x"}, r"SLURM_STEP_TASKS_PER_NODE must look like 2\(x3\),1, found 'x'"),
        (SRUN | {"SLURM_STEP_NODELIST": "n[1-"}, "A host list must look like"),
        (without(MPIRUN, "MASTER_ADDR"), "several hosts needs MASTER_ADDR"),
        (without(MPIRUN, "PMIX_NAMESPACE"), "A direct step of 4 processes needs MASTER_PORT"),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_RANK=3 needs OMPI_COMM_WORLD_SIZE"),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 does not fit OMPI_COMM_WORLD_SIZE=4"),
    ],
)
def test_a_wrong_environment_is_one_clear_error(env, message):
    with pytest.raises(RoleError, match=message):
        Role.detect(env)


def test_a_role_made_by_hand_is_checked_too():
    with pytest.raises(RoleError, match="rank 2 of a worker does not fit a total of 2"):
        Role(rank=2, world_size=2, local_world_size=2)


@given(size=st.integers(1, 64), data=st.data())
def test_families_that_agree_give_one_role_whatever_they_add(size, data):
    rank = data.draw(st.integers(0, size - 1))
    endpoints = ",".join(f"127.0.0.1:{6000 + r}" for r in range(size))
    torchrun = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "6000"}
    ours = {f"PHALANX_{k}": v for k, v in torchrun.items()}
    fleet = {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": str(size), "PADDLE_TRAINER_ENDPOINTS": endpoints}
    families = [torchrun, ours, fleet]
    chosen = data.draw(st.lists(st.sampled_from(range(3)), min_size=1, unique=True))
    role = Role.detect({k: v for i in chosen for k, v in families[i].items()})
    assert (role.rank, role.world_size, role.local_rank, role.node_count) == (rank, size, rank, 1)
    if size > 1:
        assert (role.master_addr, role.master_port) == ("127.0.0.1", 6000)


@given(st.sampled_from(["RANK", "PADDLE_TRAINER_ID", "PHALANX_RANK"]), st.integers(0, 7), st.integers(0, 7))
def test_families_that_disagree_on_the_rank_always_fail(name, rank, other):
    env = {"RANK": str(rank), "PADDLE_TRAINER_ID": str(rank), "PHALANX_RANK": str(rank)}
    env |= {"WORLD_SIZE": "8", "PHALANX_WORLD_SIZE": "8", "PADDLE_TRAINERS_NUM": "8"}
    env |= {f"{p}MASTER_{w}": v for p in ("", "PHALANX_") for w, v in (("ADDR", "127.0.0.1"), ("PORT", "1"))}
    env[name] = str(other)
    if rank == other:
        assert Role.detect(env).rank == rank
    else:
        with pytest.raises(RoleError, match="disagree about this process"):
            Role.detect(env)


@given(st.dictionaries(st.sampled_from([*OURS, *SERVER, *SRUN, *MPIRUN]), st.text(max_size=6), max_size=8))
def test_any_environment_gives_a_role_or_a_role_error(env):
    try:
        role = Role.detect(env)
    except RoleError:
        return
    assert 0 <= role.rank < role.world_size


@pytest.mark.parametrize(
    ("compact", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
    ],
)
def test_slurms_host_lists_are_expanded(compact, hosts):
    assert expand_hosts(compact) == hosts


@pytest.mark.parametrize("compact", ["n[", "n[3-1]", "n[a]", "", "a,,b", "n]"])
def test_a_broken_host_list_is_named(compact):
    with pytest.raises(RoleError, match="A host list must look like"):
        expand_hosts(compact)


@given(st.text())
def test_a_derived_port_is_one_a_user_may_bind(job):
    assert PORT_BASE <= derived_port(job) < PORT_BASE + PORT_SPAN


SECRET = "0123456789abcdef" * 4
MPI_SERVERS = {
    "OMPI_COMM_WORLD_SIZE": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "5", "PHALANX_SERVER_NUM": "2",
    "PHALANX_SERVER_ENDPOINTS": "127.0.0.1:1,127.0.0.1:2",
    "PHALANX_WORKER_ENDPOINTS": "127.0.0.1:3,127.0.0.1:4,127.0.0.1:5", "PMIX_NAMESPACE": "x",
}  # fmt: skip


def mpi_rank(rank: int, **changes: str) -> dict[str, str]:
    return MPI_SERVERS | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)} | changes


def test_the_first_ranks_of_an_mpi_step_serve_and_the_others_train():
    roles = [Role.detect(mpi_rank(rank)) for rank in range(5)]
    assert [(r.kind, r.rank, r.world_size, r.local_rank, r.local_world_size) for r in roles] == [
        ("server", 0, 2, 0, 2), ("server", 1, 2, 1, 2),
        ("worker", 0, 3, 0, 3), ("worker", 1, 3, 1, 3), ("worker", 2, 3, 2, 3),
    ]  # fmt: skip
    assert [r.endpoint for r in roles] == [f"127.0.0.1:{port}" for port in range(1, 6)]
    assert {(r.worker_num, len(r.server_endpoints), r.launcher, r.master_addr) for r in roles} == {
        (3, 2, "mpi", "127.0.0.1")
    }


def test_servers_and_workers_of_an_mpi_step_may_be_on_several_hosts():
    hosts = {
        "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PHALANX_SERVER_NUM": "1",
        "PHALANX_SERVER_ENDPOINTS": "10.0.0.1:1", "PHALANX_WORKER_ENDPOINTS": "10.0.0.1:2,10.0.0.2:1,10.0.0.2:2",
        "MASTER_ADDR": "10.0.0.1", "PMIX_NAMESPACE": "x",
    }  # fmt: skip
    local = ("0", "1", "0", "1")
    roles = [
        Role.detect(hosts | {"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_LOCAL_RANK": local[r]}) for r in range(4)
    ]
    assert [(r.kind, r.rank, r.local_rank, r.local_world_size) for r in roles] == [
        ("server", 0, 0, 1), ("worker", 0, 0, 1), ("worker", 1, 0, 2), ("worker", 2, 1, 2),
    ]  # fmt: skip


def test_a_slurm_step_splits_the_same_way_and_meets_at_the_first_worker():
    lists = {
        "PHALANX_SERVER_NUM": "2",
        "PHALANX_SERVER_ENDPOINTS": "gpu08:1,gpu08:2",
        "PHALANX_WORKER_ENDPOINTS": "gpu09:1,gpu09:2,gpu10:1",
    }
    role = Role.detect(SRUN | lists)
    assert (role.kind, role.rank, role.world_size, role.local_rank, role.master_addr) == ("worker", 1, 3, 1, "gpu09")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (mpi_rank(0, PHALANX_SERVER_NUM="5"), "PHALANX_SERVER_NUM=5 leaves no worker among the 5 processes"),
        (mpi_rank(0, PHALANX_SERVER_NUM="0"), "PHALANX_SERVER_NUM must be at least 1, found 0"),
        (without(mpi_rank(0), "PHALANX_SERVER_ENDPOINTS"), "needs PHALANX_SERVER_ENDPOINTS with 2 .* found 0"),
        (without(mpi_rank(0), "PHALANX_WORKER_ENDPOINTS"), "needs PHALANX_WORKER_ENDPOINTS with 3 .* found 0"),
        (OURS | {"PHALANX_JOB_SECRET": "hunter2"}, "must be 64 hexadecimal digits, found 7 characters"),
    ],
)
def test_a_step_with_servers_says_what_misses(env, message):
    with pytest.raises(RoleError, match=message):
        Role.detect(env)


def test_the_secret_is_read_and_never_shown():
    for env in (OURS, TORCHRUN, FLEET, SRUN, MPIRUN, SERVER):
        role = Role.detect(env | {"PHALANX_JOB_SECRET": SECRET})
        assert role.secret == bytes.fromhex(SECRET)
        assert "secret" not in repr(role)
    with pytest.raises(RoleError) as caught:
        Role.detect(OURS | {"PHALANX_JOB_SECRET": "hunter2"})
    assert "hunter2" not in str(caught.value)
