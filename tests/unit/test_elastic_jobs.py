"""A job whose number of nodes or ranks is a range: what nodes start, what Slurm and Kubernetes are asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import SpecError
from phalanx.jobs.attempt import launch_command
from phalanx.jobs.attempt.files import ExitRecord, deciding_records
from phalanx.jobs.backend import Submission
from phalanx.jobs.backends.kubernetes import manifests
from phalanx.jobs.backends.slurm.backend import Slurm
from phalanx.jobs.spec.file import read
from phalanx.jobs.spec.training_job import TrainingJob

JOB = "name: demo\ncommand: python train.py\n"


def job(resources: str, more: str = "") -> TrainingJob:
    return read(f"{JOB}resources: {{{resources}}}\n{more}")


def arguments(spec: TrainingJob, hosts: tuple[str, ...]) -> str:
    rendezvous = launch_command.Rendezvous(0, hosts)
    return " ".join(launch_command.build_command(spec, rendezvous, python="python", logs=Path("logs")).argv)


@pytest.mark.parametrize("text", ["nodes: 1:4", "nodes: '1:4'", "nodes: 4, least_nodes: 1"])
def test_a_range_is_two_numbers(text: str) -> None:
    resources = job(text).resources
    assert (resources.least_nodes, resources.nodes, resources.is_elastic) == (1, 4, True)
    assert TrainingJob.model_validate(job(text).model_dump(mode="json")).resources == resources


def test_one_number_is_no_range() -> None:
    assert not job("nodes: 4:4").resources.is_elastic
    assert not job("nodes: 4, procs_per_node: 2").resources.is_elastic


@pytest.mark.parametrize(
    ("resources", "more", "message"),
    [
        ("nodes: 4:1", "", "nodes 4:1 ends before it starts; write 1:4"),
        ("nodes: a:b", "", "nodes 'a:b' is no range; write it as 1:4"),
        ("nodes: 1:4", "launch: torchrun", "needs launch phalanx without servers; found launch torchrun"),
        ("procs_per_node: 1:4", "servers: {count: 1}", "found servers"),
        ("nodes: 0:4", "", "resources.least_nodes"),
    ],
)
def test_ranges_that_cannot_be_are_refused(resources: str, more: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        job(resources, more)


def test_nodes_start_launchers_with_the_ranges() -> None:
    both = arguments(job("nodes: 1:4, procs_per_node: 1:2"), ("a", "b", "c", "d"))
    assert "-n 1:2 --nnodes 1:4 --ips a,b,c,d" in both
    # Slurm may give fewer.
    assert "-n 1 --nnodes 1:2 --ips a,b" in arguments(job("nodes: 1:4"), ("a", "b"))
    assert "--nnodes 1 -n 1:2" in arguments(job("procs_per_node: 1:2"), ("a",))


def submission(tmp_path: Path, spec: TrainingJob) -> Submission:
    return Submission("demo-1", 1, spec, tmp_path, {})


def test_slurm_is_asked_for_a_range_and_not_to_end_with_a_node(tmp_path: Path) -> None:
    elastic = Slurm().render(submission(tmp_path, job("nodes: 1:4", "backend: slurm")))
    fixed = Slurm().render(submission(tmp_path, job("nodes: 4", "backend: slurm")))
    assert "#SBATCH --nodes=1-4\n#SBATCH --no-kill\n" in elastic
    assert "--kill-on-bad-exit=0 --no-kill " in elastic
    assert "#SBATCH --nodes=4\n" in fixed
    assert "no-kill" not in fixed


def kubernetes(dialect: str, nodes: str = "1:3") -> TrainingJob:
    return job(f"nodes: {nodes}", f"backend: kubernetes\nkubernetes: {{image: i, dialect: {dialect}}}")


def test_pods_of_a_job_set_come_back(tmp_path: Path) -> None:
    spec = kubernetes("jobset")
    manifests.check(spec)

    def template(of: TrainingJob) -> dict[str, Any]:
        *_, workload = manifests.manifests(submission(tmp_path, of), job_secret="s")
        body: dict[str, Any] = workload["spec"]["replicatedJobs"][0]["template"]["spec"]
        return body

    assert template(spec)["backoffLimit"] == 30
    assert template(spec)["podFailurePolicy"]["rules"][0]["onPodConditions"] == [{"type": "DisruptionTarget"}]
    assert template(kubernetes("jobset", "3"))["backoffLimit"] == 0


@pytest.mark.parametrize("dialect", ["trainjob", "pytorchjob"])
def test_dialects_whose_pods_do_not_come_back_are_refused(dialect: str) -> None:
    with pytest.raises(SpecError, match="dialect to jobset"):
        manifests.check(kubernetes(dialect))


def test_a_node_that_was_lost_on_the_way_does_not_fail_the_attempt() -> None:
    failed, succeeded = ExitRecord("failed"), ExitRecord("succeeded")
    assert deciding_records({0: failed, 1: None}, has_ended=False) == {0: None, 1: None}
    assert deciding_records({0: failed, 1: succeeded}, has_ended=True) == {1: succeeded}
    assert deciding_records({0: failed, 1: None}, has_ended=True) == {0: failed, 1: None}
