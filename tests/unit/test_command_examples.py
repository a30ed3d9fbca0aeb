"""Every command: an example in its help, 80 columns, `--json` for data, flags spelled one way, completion, hints."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete, CompletionItem
from click.testing import CliRunner

from phalanx.cli.completion import SHELLS
from phalanx.cli.group import main, phalanx


def commands(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, click.Context]]:
    context = click.Context(command, info_name=name, parent=parent, terminal_width=80, max_content_width=80)
    yield context.command_path, context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            inner = command.get_command(context, child)
            assert inner is not None
            yield from commands(inner, child, context)


COMMANDS = dict(commands(phalanx, "phalanx", None))


def examples(context: click.Context) -> list[str]:
    text = context.command.get_help(context)
    shown = [line.strip() for line in text.splitlines()]
    return [line.partition("   ")[0] for line in shown if line.startswith("phalanx ")]


@pytest.mark.parametrize("path", COMMANDS)
def test_the_help_has_an_example_that_the_command_takes(path: str) -> None:
    own_path = path.replace("phalanx job workspace", "phalanx workspace")  # the same commands
    assert re.search("^ *Example:$", COMMANDS[path].command.get_help(COMMANDS[path]), re.MULTILINE)
    lines = [line for line in examples(COMMANDS[path]) if line.startswith(own_path)]
    assert lines, f"{path} --help shows no example"
    for line in lines:
        command: click.Command = phalanx
        words = shlex.split(line)[1:]
        while isinstance(command, click.Group):
            inner = command.get_command(click.Context(command), words[0])
            assert inner is not None, line
            command, words = inner, words[1:]
        declared = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        own = words[: words.index("--")] if "--" in words else words
        script = next((i for i, word in enumerate(own) if word.endswith(".py")), len(own))
        takes_script_arguments = command.name in ("run", "verify")
        for word in own[:script] if takes_script_arguments else own:
            flag = word.partition("=")[0]
            if flag.startswith("-"):
                assert flag in declared or flag.replace("_", "-") in declared or flag.replace("-", "_") in declared, (
                    line
                )


@pytest.mark.parametrize("path", COMMANDS)
def test_the_help_fits_a_terminal_of_80_columns(path: str) -> None:
    context = COMMANDS[path]
    long = [line for line in context.command.get_help(context).splitlines() if len(line) > 80]
    assert long == []


ROOT = Path(__file__).parents[2]

NO_JSON = {
    "phalanx run": "prints what the script prints",
    "phalanx job run": "prints what the script prints",
    "phalanx rank-table make": "prints a rank table, which is JSON",
    "phalanx rank-table convert": "prints a rank table, which is JSON",
    "phalanx serve": "serves until it is stopped",
    "phalanx ui": "serves until it is stopped",
    "phalanx serve-table": "serves until it is stopped",
    "phalanx completion": "prints a script for a shell",
}
"""Commands without --json, and why."""


def options_of(path: str) -> list[click.Option]:
    return [option for option in COMMANDS[path].command.params if isinstance(option, click.Option)]


def test_the_list_of_commands_has_each_once():
    context = COMMANDS["phalanx"]
    listed = re.findall(r"^  ([a-z][a-z-]*)  ", context.command.get_help(context), re.MULTILINE)
    assert isinstance(context.command, click.Group)
    assert sorted(listed) == sorted(context.command.list_commands(context))


def test_every_command_that_prints_data_prints_json():
    leaves = {path for path, context in COMMANDS.items() if not isinstance(context.command, click.Group)}
    without = {path for path in leaves if not any("--json" in option.opts for option in options_of(path))}
    assert without == set(NO_JSON)


def test_flags_are_shown_with_hyphens():
    for path in COMMANDS:
        shown = [option for option in options_of(path) if not option.hidden]
        assert not [flag for option in shown for flag in (*option.opts, *option.secondary_opts) if "_" in flag], path


def test_flags_of_fleet_and_torchrun_are_known_as_those_spell_them():
    words = ["--server_num=1", "--worker_num", "2", "--log_dir", "logs", "--nproc_per_node", "3", __file__]
    values = COMMANDS["phalanx run"].command.make_context("run", words).params
    assert [values[name] for name in ("server_num", "worker_num", "log_dir", "nproc_per_node")] == [1, 2, "logs", 3]
    words = ["doctor", "--node_rank", "1", "--master_addr", "10.0.0.1"]
    group = phalanx.make_context("phalanx", words)
    values = COMMANDS["phalanx doctor"].command.make_context("doctor", words[1:], parent=group).params
    assert (values["node_rank"], values["master_addr"]) == (1, "10.0.0.1")


def flags_in_docs() -> list[tuple[str, str, str]]:
    """Return the place, the command and the flag of every `phalanx COMMAND ... --flag` in the docs."""
    pages = [ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs").rglob("*.md")]
    flags_written: list[tuple[str, str, str]] = []
    for page in pages:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"(?:`|^ *(?:\$ )?)phalanx ([a-z][^\n`|#]*)", text, re.MULTILINE):
            words = line.split()
            depth = max((n for n in range(1, 4) if "phalanx " + " ".join(words[:n]) in COMMANDS), default=0)
            path = "phalanx " + " ".join(words[:depth])
            own = words[depth:]
            ends = [i for i, word in enumerate(own) if word == "--" or word.endswith(".py") or word in ("...", "→")]
            own = own[: ends[0]] if ends else own
            flags = [word.partition("=")[0] for word in own if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)]
            flags_written += [(page.name, path, flag) for flag in flags if depth]
    return flags_written


def test_docs_spell_flags_as_the_help_does():
    flags_written = flags_in_docs()
    assert len(flags_written) > 100
    for page, path, flag in flags_written:
        known = {name for option in options_of(path) for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        assert flag in known, f"{page}: {path} {flag}"


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        ("lanch", "phalanx: There is no command 'lanch'. Did you mean 'phalanx run'? `phalanx --help` shows how."),
        ("logs", "phalanx: There is no command 'logs'. Did you mean 'phalanx job logs'? `phalanx --help` shows how."),
        ("job sumbit", "phalanx job: There is no command 'phalanx job sumbit'. Did you mean 'submit'?"),
        ("rank-table chek", "phalanx rank-table: No such command 'chek'. Did you mean 'check'?"),
        ("job submit --gpus 2", "No such option '--gpus'. Did you mean '--gpu'? `phalanx job submit --help` lists"),
        ("doctor --node_rnk 2", "phalanx doctor: No such option '--node-rnk'. Did you mean '--node-rank'?"),
        ("plan --clutser h100x8", "phalanx plan: No such option '--clutser'. Did you mean '--cluster'?"),
        ("job list --state runing", "'stopped'. Did you mean 'running'?"),
        (
            "completion",
            "phalanx completion: Missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish. `phalanx",
        ),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_right_word(
    words: str, mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["phalanx", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert mistake in error
    assert error.count("\n") == 1


def test_ranks_of_a_node_have_every_name_that_hands_type():
    for flag in ("-n", "--nprocs", "--nproc-per-node", "--nproc_per_node", "--procs-per-node", "--procs_per_node"):
        for path in ("phalanx run", "phalanx job submit"):
            words, parent = [flag, "3", "train.py"], click.Context(phalanx, **phalanx.context_settings)
            context = COMMANDS[path].command.make_context(path, words, parent=parent, resilient_parsing=True)
            assert str(context.params.get("nproc_per_node") or context.params.get("procs_per_node")) == "3", flag


def completions(words: str, begun: str) -> list[CompletionItem]:
    return BashComplete(phalanx, {}, "phalanx", "_PHALANX_COMPLETE").get_completions(words.split(), begun)


def test_shells_complete_flags_values_and_files():
    assert [item.value for item in completions("job submit", "--back")] == ["--backend"]
    assert [item.value for item in completions("job submit --backend", "s")] == ["slurm"]
    for words in ("run -n 2", "job submit", "plan", "verify", "predict"):
        assert [item.type for item in completions(words, "tr")] == ["file"], words


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_for_a_shell_asks_phalanx(shell: str) -> None:
    assert f"_PHALANX_COMPLETE={shell}_complete" in CliRunner().invoke(phalanx, ["completion", shell]).stdout


@pytest.mark.parametrize("colour", [{}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}])
def test_nothing_is_coloured_in_a_pipe_or_where_no_colour_is_wanted(
    colour: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in colour.items():
        monkeypatch.setenv(name, value)
    output = CliRunner().invoke(phalanx, ["env", "--list"], env={"COLUMNS": "80"}).stdout
    assert "PHALANX_LANG" in output
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", output)
    assert max(map(len, output.splitlines())) <= 80
    assert json.loads(CliRunner().invoke(phalanx, ["env", "--list", "--json"]).stdout)
