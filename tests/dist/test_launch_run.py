"""One collective run on this host, looked at from all sides."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launching import BIN, Launch, launch

pytestmark = pytest.mark.dist

SCRIPT = """
import json, logging, os, sys, warnings

rank = int(os.environ["RANK"])
print(f"text of rank {rank}", flush=True)
logging.info("hidden unless a format is asked for")
if rank:
    logging.warning("look here")
    for _ in range(3):
        warnings.warn_explicit("again", UserWarning, "x.py", 1, registry={})
facts = {"env": dict(os.environ), "argv": sys.argv, "path0": sys.path[0], "main": __name__, "file": __file__}
facts["stdin"] = sys.stdin.read()
with open(f"facts.{rank}", "w") as file:
    json.dump(facts, file)
print("half a line", end="")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    folder = tmp_path_factory.mktemp("run")
    (folder / "show.py").write_text(SCRIPT)
    environment = {"MY_SECRET_TOKEN": "hush-hush"}
    return launch(
        folder, "--verbose", "-n", "2", "show.py", "--lr", "0.1", "--", "-x", "-n", "7", environment=environment
    )


@pytest.fixture(scope="module")
def facts(run: Launch) -> list[dict]:
    assert run.code == 0, run.out + run.err
    return [json.loads((run.cwd / f"facts.{rank}").read_text()) for rank in range(2)]


def test_the_banner_shows_thirteen_settings_once(run: Launch) -> None:
    lines = run.out.splitlines()
    start = lines.index("----------- Configuration Arguments -----------")
    names = [line.split(":")[0] for line in lines[start + 1 : start + 14]]
    assert names == sorted(names)
    assert lines[start + 14] == "-" * 47
    assert run.out.count("Configuration Arguments") == 1
    assert "training_script_args: ['--lr', '0.1', '--', '-x', '-n', '7']" in lines


def test_programs_are_told_how_the_job_ended(run: Launch) -> None:
    assert json.loads(run.log("ended.json")) == {"code": 0}


def test_the_mode_is_told_in_the_known_words(run: Launch) -> None:
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \w+\.py:\d+\] "
    assert re.search(
        f"^WARNING {line}Not found distinct arguments and not compiled with cuda. Default use collective mode$",
        run.out,
        re.MULTILINE,
    )
    assert "\nlaunch train in CPU mode\n" in run.out
    assert re.search(
        rf"^INFO {line}Local start 2 processes\. First process distributed environment info \(Only For Debug\):$",
        run.out,
        re.MULTILINE,
    )
    assert re.search(r"OMP_NUM_THREADS=\d+ for each process", run.out)


def test_the_table_is_the_environment_of_rank_0(run: Launch, facts: list[dict]) -> None:
    rows = dict(re.findall(r"^ +\| (PADDLE_\w+) +(\S+) \|$", run.out, re.MULTILINE))
    assert rows == {name: facts[0]["env"][name] for name in rows}
    assert set(rows) == {
        "PADDLE_TRAINER_ENDPOINTS",
        "PADDLE_TRAINER_ID",
        "PADDLE_TRAINERS_NUM",
        "PADDLE_CURRENT_ENDPOINT",
    }


def test_secrets_reach_the_ranks_but_not_the_screen(run: Launch, facts: list[dict]) -> None:
    assert facts[1]["env"]["MY_SECRET_TOKEN"] == "hush-hush"
    logs = "".join(p.read_text() for p in (run.cwd / "log").iterdir() if p.is_file())
    assert "hush" not in run.out + run.err + logs


def test_both_families_of_names_agree_with_ours(facts: list[dict]) -> None:
    for rank, found in enumerate(facts):
        env = found["env"]
        assert {env["RANK"], env["PADDLE_TRAINER_ID"], env["PHALANX_RANK"], env["LOCAL_RANK"]} == {str(rank)}
        assert {env["WORLD_SIZE"], env["PADDLE_TRAINERS_NUM"], env["PHALANX_WORLD_SIZE"]} == {"2"}
        assert env["PADDLE_TRAINER_ENDPOINTS"].split(",")[rank] == env["PADDLE_CURRENT_ENDPOINT"]
        assert env["GLOO_SOCKET_IFNAME"] == "lo"
        assert env["PHALANX_ENDPOINT_FD"].isdigit()


def test_endpoints_log_lists_what_the_environment_says(run: Launch, facts: list[dict]) -> None:
    title, *endpoints = run.log("endpoints.log").split()
    assert title == "PADDLE_TRAINER_ENDPOINTS:"
    assert endpoints == facts[0]["env"]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert "can be found in log/endpoints.log" in run.out
    assert "maybe found in log/workerlog.0" in run.out


def test_the_script_runs_as_main_with_its_own_arguments(run: Launch, facts: list[dict]) -> None:
    assert facts[0]["argv"] == ["show.py", "--lr", "0.1", "--", "-x", "-n", "7"]
    assert facts[0]["path0"] == str(run.cwd)
    assert (facts[0]["main"], facts[0]["file"], facts[0]["stdin"]) == ("__main__", "show.py", "")


def test_rank_0_is_on_the_terminal_and_the_others_in_their_files(run: Launch) -> None:
    assert "\ntext of rank 0\n" in run.out
    assert "text of rank 1" not in run.out
    assert "text of rank 1" in run.log("workerlog.1")
    assert "hidden" not in run.out


def test_warnings_of_other_ranks_appear_once_with_their_rank(run: Launch) -> None:
    assert run.out.count("rank 1: WARNING:root:look here\n") == 1
    assert run.out.count("rank 1: x.py:1: UserWarning: again (x3)\n") == 1


def test_the_next_run_keeps_the_logs_of_the_one_before(run: Launch) -> None:
    (run.cwd / "other.py").write_text("import logging; logging.info('second'); print('second')")
    done = launch(run.cwd, "-v", "--log-format", "bar", "-n", "1", "other.py")
    assert done.code == 0
    assert "text of rank 1" in run.log("previous/workerlog.1")
    assert not (run.cwd / "log" / "workerlog.1").exists()
    path = re.escape(str(run.cwd / "other.py"))
    assert re.search(
        r"^INFO\|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\|(other\.py|" + path + r")\|1\|second$", done.out, re.MULTILINE
    )
    assert re.search(r"^INFO\|[^|]+\|/.+/start_messages\.py\|\d+\|OMP_NUM_THREADS", done.out, re.MULTILINE)


def test_without_n_one_process_starts_and_that_is_said(run: Launch) -> None:
    (run.cwd / "one.py").write_text("import os; print('world', os.environ['WORLD_SIZE'])")
    done = launch(run.cwd, "one.py", environment={"OMP_NUM_THREADS": "3"})
    assert "No -n given: 1 process" in done.out
    assert "world 1\n" in done.out
    assert "OMP_NUM_THREADS=3 for each process (from your environment)" in done.out


def test_a_start_takes_few_lines(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text("import os; print('rank', os.environ['RANK'])")
    done = launch(tmp_path, "--nprocs", "2", "say.py", environment={"OMP_NUM_THREADS": "1"})
    assert done.out.splitlines() == [
        "starting 2 ranks on this node, CPU; OMP_NUM_THREADS=1 for each process (from your environment)",
        "logs: log/workerlog.N",
        "rank 0",
    ]


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(7)", 7), ("import sys; sys.exit('no data')", 1), ("import os; os._exit(9)", 9)],
)
def test_the_exit_code_of_the_script_is_the_launchers(tmp_path: Path, code: str, expected: int) -> None:
    (tmp_path / "end.py").write_text(code)
    done = launch(tmp_path, "end.py")
    assert done.code == expected
    assert f"rank 0 ended with exit code {expected}" in done.out


@pytest.mark.parametrize("arguments", [["-m", "wrong"], ["wrong.py"]])
def test_a_traceback_starts_in_the_script(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "wrong.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndef f():\n    raise ValueError('x')\nf()\n"
    )
    done = launch(tmp_path, "-n", "2", *arguments)
    assert done.code == 1
    for text in (done.out, done.log("workerlog.0"), done.log("workerlog.1")):
        trace = text.partition("Traceback")[2].splitlines()
        assert "wrong.py" in trace[1]
        assert "entry.py" not in text
        assert "runpy" not in text


def test_a_module_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "go.py").write_text("import sys; print('went', __name__, sys.argv[1:])")
    assert "went __main__ ['-a']" in launch(tmp_path, "-m", "pack.go", "-a").out


@pytest.mark.parametrize(
    "program",
    [
        (str(BIN / "phalanx"), "run"),
        (str(BIN / "python"), "-m", "phalanx.launch"),
        (str(BIN / "python"), "-m", "phalanx.distributed.launch"),
        (str(BIN / "fleetrun"),),
    ],
)
def test_every_spelling_of_the_command_prints_the_same_banner(tmp_path: Path, program: tuple[str, ...]) -> None:
    if not Path(program[0]).exists():
        pytest.skip(f"{program[0]} is not installed")
    (tmp_path / "nothing.py").write_text("")
    is_fleet = program[-1] in (str(BIN / "fleetrun"), "phalanx.distributed.launch")
    verbose = () if is_fleet else ("-v",)
    done = launch(tmp_path, *verbose, "--nproc-per-node=1", "--log-dir", "out", "nothing.py", program=program)
    assert done.code == 0, done.err
    banner = done.out[: done.out.index("WARNING")]
    assert banner == (
        "----------- Configuration Arguments -----------\n"
        "gpus: None\nheter_worker_num: None\nheter_workers: \nhttp_port: None\nips: 127.0.0.1\nlog_dir: out\n"
        "nproc_per_node: 1\nserver_num: None\nservers: \ntraining_script: nothing.py\ntraining_script_args: []\n"
        "worker_num: None\nworkers: \n-----------------------------------------------\n"
    )
    assert (tmp_path / "out" / "workerlog.0").exists()
