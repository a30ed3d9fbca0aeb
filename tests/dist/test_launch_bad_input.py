"""Every mistake in the command gets one clear answer before anything starts."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from launching import BIN, free_port, launch
from phalanx.launch.cli import flags
from phalanx.launch.process import log_format

pytestmark = pytest.mark.dist

PS = (str(BIN / "python"), "-m", "phalanx.distributed.launch_ps")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('started')")
    return tmp_path


@pytest.fixture
def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns what the launcher says of a command that it does not start; in this process."""
    monkeypatch.chdir(folder)
    # What it would do to the log lines and, for --lang, to the environment of this process, other tests would find.
    monkeypatch.setattr(log_format, "configure_launcher", lambda *_: None)
    monkeypatch.setenv("PHALANX_LANG", "")

    def refused(*arguments: str, **environment: str) -> str:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        code = flags.run(arguments, None, name="phalanx run", wants_servers=False)
        out, err = capfd.readouterr()
        assert code == 2, out + err
        assert "started" not in out
        assert not (folder / "log").exists()
        return " ".join(err.split())

    return refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0,1", "train.py"], r"--gpus 0,1 needs CUDA, but .*on the CPU.*-n 2"),
        (["missing.py"], r"'missing\.py' does not exist"),
        (["."], r"'\.' is a directory\. Give the Python file to run"),
        (["-n", "0", "train.py"], r"'0' is no number of processes\. Give a whole number, at least 1"),
        (["--nproc-per-node", "two", "train.py"], r"'two' is no number of processes"),
        (["--nproc-per-node=-1", "train.py"], r"'-1' is no number of processes"),
        (["--server-num", "0", "train.py"], r"'0' is no number of servers\..*without servers start with -n 2"),
        (["--server-num", "1", "--worker-num", "0", "train.py"], r"'0' is no number of workers\. Give .* at least 1"),
        (["--nproc_per_nod", "2", "train.py"], r"No such option.*Did you mean '--nproc-per-node'"),
        (["--no_such_flag=1", "train.py"], r"No such option '--no-such-flag'"),
        (["--http-port", "70000", "train.py"], r"'70000' is no port"),
        (["--ips", "10.255.255.1", "train.py"], r"None of the hosts 10\.255\.255\.1 is this host"),
        (["--ips", "300.1.1.1", "train.py"], r"'300\.1\.1\.1' is no address and no host name"),
        (["--ips", "127.0.0.1,127.0.0.2", "train.py"], r"Add --node-rank \(0 or 1\)"),
        (["-n", "2", "--server-num", "1", "train.py"], r"both were given"),
        (["--server-num", "1", "train.py"], r"--worker-num is missing"),
        (["--log-format", "xml", "train.py"], r"'xml' is not one of 'default', 'bar', 'json'"),
        ([], r"Missing argument 'TRAINING_SCRIPT'"),
        (["--cluster_node_ips", "1.2.3.4", "train.py"], r"--cluster_node_ips is now called --ips"),
        (["--selected-gpus=0", "train.py"], r"--selected_gpus is now called --gpus"),
        (["--np", "2", "train.py"], r"--np is now called --nproc-per-node"),
        (["--node_ip=1.2.3.4", "train.py"], r"--node_ip was removed: "),
        (["--use_paddlecloud", "train.py"], r"--use_paddlecloud was removed: "),
        (["--started_port", "6170", "train.py"], r"--started_port was removed: .*--http-port"),
        (["--log_level", "INFO", "train.py"], r"--log_level was removed: "),
        (["--print_config", "train.py"], r"--print_config was removed: "),
    ],
)
def test_a_wrong_command_is_refused(refused: Callable[..., str], arguments: list[str], message: str) -> None:
    said = refused(*arguments)
    assert re.search(message, said), said


def test_a_refused_command_ends_with_the_message_alone(folder: Path) -> None:
    done = launch(folder, "-n", "0", "train.py")
    assert done.code == 2
    assert "'0' is no number of processes" in done.err
    assert "Traceback" not in done.err
    assert "started" not in done.out


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["missing.py"], {"LANG": "zh_CN.UTF-8"}, r"训练脚本 training_script 'missing\.py' 不存在"),
        (["--lang", "zh", "missing.py"], {}, r"训练脚本 training_script 'missing\.py' 不存在"),
        (
            ["--lang", "zh", "--nproc_per_nod", "2", "train.py"],
            {},
            r"没有选项 '--nproc-per-nod'。您是否想写 '--nproc-per-node'",
        ),
        (["--lang=en", "missing.py"], {"LANG": "zh_CN.UTF-8"}, r"'missing\.py' does not exist"),
        (["train.py"], {"RANK": "0", "WORLD_SIZE": "2"}, r"RANK=0 and WORLD_SIZE=2 .*--world-size-counts nodes"),
        (
            ["train.py"],
            {"PET_NNODES": "2", "SLURM_JOB_ID": "1", "SLURM_NNODES": "3"},
            r"PET_NNODES=2 and SLURM_NNODES=3",
        ),
    ],
)
def test_mistakes_are_told_in_the_users_language_and_name_the_variables(
    refused: Callable[..., str], arguments: list[str], environment: dict[str, str], message: str
) -> None:
    said = refused(*arguments, **environment)
    assert re.search(message, said), said


def test_launch_ps_is_for_parameter_servers(folder: Path) -> None:
    done = launch(folder, "train.py", program=PS)
    assert done.code == 2
    assert "Add e.g. --server-num 1 --worker-num 2." in done.err


def test_a_port_in_use_is_named_with_its_owner(folder: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = launch(folder, "--http-port", str(port), "train.py")
    assert done.code == 2
    assert re.search(
        rf"--http-port {port} on 127\.0\.0\.1 is in use by pid {os.getpid()} \(.*python.*\)\. End that process",
        done.err,
    )


def test_a_fixed_port_is_the_one_the_ranks_are_told(folder: Path) -> None:
    port = free_port()
    (folder / "port.py").write_text("import os; print('port', os.environ['MASTER_PORT'])")
    assert f"port {port}\n" in launch(folder, "--master-port", port, "port.py").out


def test_a_log_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    done = launch(folder, "--log-dir", "train.py/log", "train.py")
    assert done.code == 2
    assert "--log-dir train.py/log cannot be written to (Not a directory)" in done.err


def test_torch_of_another_version_is_refused(folder: Path) -> None:
    fake = folder / "site" / "torch-1.13.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1\n")
    done = launch(folder, "train.py", environment={"PYTHONPATH": str(folder / "site")})
    assert done.code == 2
    assert re.search(r"Phalanx needs torch >=\d.*found 1\.13\.1", done.err)
    assert "Traceback" not in done.err


def test_help_reads_well(folder: Path) -> None:
    done = launch(folder, "--help")
    assert done.code == 0
    assert "phalanx run -n 2 train.py" in done.out
    assert "--nproc-per-node" in done.out
    assert "--selected_gpus" not in done.out


def test_an_unknown_command_gets_the_nearest_name(folder: Path) -> None:
    done = launch(folder, "rum", program=(str(BIN / "phalanx"),))
    assert done.code == 2
    assert "There is no command 'rum'. Did you mean 'phalanx run'?" in done.err
    done = launch(folder, "-n", "2", "x.py", program=(str(BIN / "phalanx"), "launch"))
    assert "There is no command 'launch'. Did you mean 'phalanx run'?" in done.err


def test_the_time_to_wait_comes_from_the_flag_then_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print('waits', os.environ['PHALANX_RENDEZVOUS_TIMEOUT_S'])")
    said = {"environment": {"PHALANX_RENDEZVOUS_TIMEOUT_S": "7.5"}}
    assert "waits 7.5\n" in launch(tmp_path, "train.py", **said).out
    assert "waits 9\n" in launch(tmp_path, "--timeout", "9", "train.py", **said).out
    wrong = launch(tmp_path, "train.py", environment={"PHALANX_RENDEZVOUS_TIMEOUT_S": "soon"})
    assert wrong.code == 2
    assert "'soon' is no number of seconds. Give one above 0." in wrong.err
