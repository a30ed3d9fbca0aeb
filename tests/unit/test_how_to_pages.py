"""Commands and job files of the how-to pages are those that the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from command_words import unknown_flags
from phalanx.jobs.spec.training_job import TrainingJob

DOCS = Path(__file__).parents[2] / "docs"
TERMS = (
    *("FSDP", "DDP", "activation checkpointing", "tensor parallel", "gradient accumulation", "mixed precision"),
    *("NCCL", "OOM", "Slurm", "Kubernetes", "Docker", "incremental training", "fault tolerance", "W&B", "profile"),
)
PAGES = ("install", "docker", "slurm", "kubernetes", "incremental")


def command_lines(text: str) -> list[list[str]]:
    """Return the words of each `phalanx COMMAND ...` of a page's indented lines and shell blocks."""
    shells = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    # What follows a command: a comment, a pipe, the end of "$(...)".
    lines = [re.split(r' #|\||\)"', line)[0] for line in [*indented, *"\n".join(shells).splitlines()]]
    starts = (re.search(r"(?<![\w./:-])phalanx (?=[a-z])", line) for line in lines)
    commands = [shlex.split(line[start.end() :]) for line, start in zip(lines, starts, strict=True) if start]
    return [words for words in commands if words[0] != "phalanx"]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_flag_of_a_page_exists(page: str) -> None:
    commands = command_lines((DOCS / f"{page}.md").read_text())
    assert [words for words in commands if unknown_flags(words)] == []


def test_the_pages_show_commands() -> None:
    assert sum(len(command_lines((DOCS / f"{page}.md").read_text())) for page in PAGES) > 8


def test_the_job_on_kubernetes_is_a_job() -> None:
    (text,) = re.findall(r"```yaml[^\n]*\n(.*?)```", (DOCS / "kubernetes.md").read_text(), re.DOTALL)
    job = TrainingJob.model_validate(yaml.safe_load(text))
    assert (job.backend, job.resources.nodes) == ("kubernetes", 2)


@pytest.mark.parametrize("term", TERMS)
def test_the_list_of_pages_or_the_faq_has_the_term_that_people_search_for(term: str) -> None:
    assert term.casefold() in ((DOCS / "README.md").read_text() + (DOCS / "faq.md").read_text()).casefold()
