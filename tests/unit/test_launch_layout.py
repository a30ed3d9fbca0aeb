"""Ranks, environments and tables."""

from __future__ import annotations

import re
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.process import environment
from phalanx.launch.reports import report
from phalanx.launch.request.topology import NodeOffer, Topology, build_topology, check_terms


def offer(node: int, **endpoints: list[str]) -> NodeOffer:
    return NodeOffer(
        node_rank=node,
        address=f"10.0.0.{node + 1}",
        hostname=f"host{node}",
        endpoints=endpoints,  # type: ignore[arg-type]
        job_id="job" if node == 0 else f"other{node}",
        store_port=29777 if node == 0 else 0,
        terms={"mode": "collective", "--max-restarts": "0"},
    )


TWO_NODES = [
    offer(0, worker=["10.0.0.1:1", "10.0.0.1:2"]),
    offer(1, worker=["10.0.0.2:1"]),
]


def facts(**changes: Any) -> environment.JobFacts:
    values: dict[str, Any] = {
        "mode": "collective",
        "log_dir": "/logs",
        "attempt": 1,
        "max_restarts": 2,
        "timeout_s": 60.0,
        "gloo_path": "/run/gloo",
        "interface": "eth0",
        "is_multi_host": True,
    }
    return environment.JobFacts(**{**values, **changes})


def second_node() -> Topology:
    return build_topology(TWO_NODES, 1, {}, "/logs")


def test_ranks_count_through_the_nodes_in_order() -> None:
    layout = second_node()
    assert [(p.rank, p.local_rank, p.title, p.log_file) for p in layout.local] == [
        (2, 0, "rank 2", "/logs/workerlog.2")
    ]
    assert layout.job_id == "job"
    assert layout.master == ("10.0.0.1", 29777)


def test_listed_endpoints_decide_the_ranks() -> None:
    listed = ("10.0.0.2:1", "10.0.0.1:2", "10.0.0.1:1")
    layout = build_topology(TWO_NODES, 0, {"worker": listed}, "/logs")
    assert [(p.rank, p.endpoint) for p in layout.local] == [(2, "10.0.0.1:1"), (1, "10.0.0.1:2")]


def test_nodes_with_other_terms_are_refused() -> None:
    other = NodeOffer(**{**TWO_NODES[1].to_json(), "terms": {"mode": "ps", "--max-restarts": "0"}})
    with pytest.raises(LaunchError, match=r"mode is collective on host0 \(node 0\) and ps on host1 \(node 1\)"):
        check_terms([TWO_NODES[0], other])
    listed = [
        NodeOffer(
            **{**TWO_NODES[n].to_json(), "terms": {"the number of hosts": str(n + 2), "--ips": "a,b,c"[: 3 + 2 * n]}}
        )
        for n in range(2)
    ]
    with pytest.raises(LaunchError, match=r"--ips is a,b on host0 \(node 0\) and a,b,c on host1 \(node 1\)"):
        check_terms(listed)


def test_every_family_of_names_agrees() -> None:
    layout = second_node()
    variables = environment.build(layout.local[0], layout, facts(), {})
    pairs = {
        "RANK": ("PHALANX_RANK", "PADDLE_TRAINER_ID", "2"),
        "WORLD_SIZE": ("PHALANX_WORLD_SIZE", "PADDLE_TRAINERS_NUM", "3"),
        "LOCAL_RANK": ("PHALANX_LOCAL_RANK", "0"),
        "LOCAL_WORLD_SIZE": ("PHALANX_LOCAL_WORLD_SIZE", "1"),
        "GROUP_RANK": ("PHALANX_NODE_RANK", "1"),
        "GROUP_WORLD_SIZE": ("PHALANX_NODE_COUNT", "2"),
        "MASTER_ADDR": ("PHALANX_MASTER_ADDR", "10.0.0.1"),
        "MASTER_PORT": ("PHALANX_MASTER_PORT", "29777"),
        "TORCHELASTIC_RESTART_COUNT": ("PHALANX_ATTEMPT", "1"),
        "TORCHELASTIC_RUN_ID": ("PHALANX_JOB_ID", "job"),
        "PADDLE_TRAINER_ENDPOINTS": ("PHALANX_WORKER_ENDPOINTS", "10.0.0.1:1,10.0.0.1:2,10.0.0.2:1"),
        "PADDLE_CURRENT_ENDPOINT": ("PHALANX_ENDPOINT", "10.0.0.2:1"),
    }
    for name, (*others, value) in pairs.items():
        assert {variables[n] for n in (name, *others)} == {value}
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "eth0"


def test_the_interface_the_user_chose_stays() -> None:
    layout = second_node()
    variables = environment.build(layout.local[0], layout, facts(), {"GLOO_SOCKET_IFNAME": "ib0"})
    assert "GLOO_SOCKET_IFNAME" not in variables


def test_each_rank_is_told_its_own_cards_and_finds_the_first_at_its_local_rank() -> None:
    layout = build_topology(TWO_NODES, 0, {}, "/logs")
    dealt = facts(gpus=(("0", "1"), ("2", "3")))
    found = [environment.build(p, layout, dealt, {}) for p in layout.local]
    assert [v["FLAGS_selected_gpus"] for v in found] == ["0,1", "2,3"]
    assert [v["CUDA_VISIBLE_DEVICES"] for v in found] == ["0,2,1,3"] * 2


def test_parameter_server_workers_see_only_their_own_cards() -> None:
    layout = parameter_servers()
    dealt = facts(mode="ps", gpus=(("0",), ("1",)))
    found = [environment.build(p, layout, dealt, {}) for p in layout.local]
    assert [v["CUDA_VISIBLE_DEVICES"] for v in found] == ["", "0", "1"]
    assert [v.get("XPU_VISIBLE_DEVICES") for v in found] == [None, "0", "1"]
    assert dict(environment.table_rows(layout.local[2], "ps", found[2]))["FLAGS_selected_xpus"] == "1"


def parameter_servers() -> Topology:
    here = offer(0, server=["127.0.0.1:34008"], worker=["127.0.0.1:18913", "127.0.0.1:10025"], heter_worker=[])
    return build_topology([here], 0, {}, "/logs")


def test_server_and_worker_read_what_fleet_wrote() -> None:
    layout = parameter_servers()
    server, worker, _ = layout.local
    variables = environment.build(server, layout, facts(mode="ps"), {})
    assert dict(environment.table_rows(server, "ps", variables)) == {
        "TRAINING_ROLE": "PSERVER",
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": "34008",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:34008",
        "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:18913,127.0.0.1:10025",
        "PADDLE_HETER_TRAINER_IP_PORT_LIST": "",
        "PADDLE_WITH_GLOO": "0",
        "PADDLE_GLOO_RENDEZVOUS": "3",
        "PADDLE_GLOO_HTTP_ENDPOINT": "10.0.0.1:29777",
        "PADDLE_GLOO_FS_PATH": "/run/gloo",
    }
    assert variables["PHALANX_WORLD_SIZE"] == "1"
    variables = environment.build(worker, layout, facts(mode="ps"), {"PADDLE_GLOO_RENDEZVOUS": "2"})
    assert (variables["TRAINING_ROLE"], variables["PADDLE_TRAINER_ID"]) == ("TRAINER", "0")
    assert variables["PADDLE_GLOO_RENDEZVOUS"] == "2"


def test_the_environment_table_shows_no_secret() -> None:
    layout = second_node()
    variables = environment.build(layout.local[0], layout, facts(), {"AWS_SECRET": "hush"}) | {"MY_TOKEN": "hush"}
    text = report.environment_table(environment.table_rows(layout.local[0], "collective", variables))
    assert "hush" not in text
    assert re.search(r"\| PADDLE_TRAINERS_NUM +3 \|", text)
    assert len({len(line) for line in text.splitlines()}) == 1


def test_a_long_value_is_cut_in_the_middle() -> None:
    text = report.environment_table([("NAME", "a" * 100 + "b" * 100)])
    assert re.search(r"a{20,}\.\.\.b{20,}", text)
    assert len({len(line) for line in text.splitlines()}) == 1


def test_a_table_of_short_values_fits_into_80_columns() -> None:
    rows = [("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:36399,127.0.0.1:50049"), ("PADDLE_TRAINER_ID", "0")]
    lines = report.environment_table(rows).splitlines()
    assert {len(line) for line in lines} == {4 + 2 + 2 + 26 + 31}
    assert lines[4] == f"    | PADDLE_TRAINER_ID         {'0':>31} |"


def test_the_banner_is_framed() -> None:
    lines = report.banner([("gpus", "0,1"), ("ips", "127.0.0.1")]).splitlines()
    assert lines[0] == "----------- Configuration Arguments -----------"
    assert lines[1:] == ["gpus: 0,1", "ips: 127.0.0.1", "-" * len(lines[0])]


def test_servers_are_told_where_to_keep_their_state_and_workers_how_long_to_ask() -> None:
    layout = parameter_servers()
    given = facts(mode="ps", secret="ab" * 32, server_dir="/state")
    server, worker, _ = (
        environment.build(p, layout, given, {"PHALANX_SERVER_DURABILITY": "disk"}) for p in layout.local
    )
    assert (server["PHALANX_SERVER_DIR"], server["PHALANX_SERVER_DURABILITY"]) == ("/state/0", "disk")
    assert (worker["PHALANX_SERVER_RETRY_S"], worker.get("PHALANX_SERVER_DIR")) == ("60", None)
    assert server["PHALANX_JOB_SECRET"] == worker["PHALANX_JOB_SECRET"] == "ab" * 32
    plain = environment.build(layout.local[0], layout, facts(mode="ps", max_restarts=0), {})
    assert (plain["PHALANX_SERVER_DIR"], plain["PHALANX_SERVER_RETRY_S"]) == (None, "0")


def test_the_secret_is_in_no_table_and_in_no_repr() -> None:
    given = facts(mode="ps", secret="ab" * 32)
    for process in parameter_servers().local:
        variables = environment.build(process, parameter_servers(), given, {})
        assert "ab" * 32 not in str(environment.table_rows(process, "ps", variables))
    assert "ab" * 32 not in repr(given)


def test_servers_see_no_card_and_workers_only_those_asked_for() -> None:
    layout = parameter_servers()
    found = [environment.build(p, layout, facts(mode="ps"), {}) for p in layout.local]
    assert [v["CUDA_VISIBLE_DEVICES"] for v in found] == ["", "", ""]
