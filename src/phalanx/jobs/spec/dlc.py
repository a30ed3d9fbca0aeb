"""`translate`: convert PAI-DLC CreateJob requests to job specs (pure).

In a pod of DLC, WORLD_SIZE and RANK count pods: such a job becomes `launch: env`, with a node for each pod.
Source: the page of CreateJob in the API reference of PAI-DLC, version 2020-12-03.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from phalanx.errors import SpecError
from phalanx.jobs.spec.command import parse_command
from phalanx.jobs.spec.quantities import to_bytes
from phalanx.jobs.spec.training_job import RESERVED_VARIABLES

_ROLES = ("Master", "Worker")
_REASONS = {
    "WorkspaceId": "workspaces here have names of their own; say --workspace",
    "ResourceId": "it is a quota of DLC; say --set queue=NAME",
    "ThirdpartyLibs": "nothing is installed into a job; have them in its environment or image",
    "ThirdpartyLibDir": "nothing is installed into a job; have its requirements in the environment or image",
    "ElasticSpec": "a job has as many nodes as it asks for",
    "SuccessPolicy": "a job has succeeded when all its nodes have",
    "CredentialConfig": "store what the job needs with `phalanx secret add`",
    "Accessibility": "all members of a workspace see its jobs",
}


def is_request(body: Mapping[str, Any]) -> bool:
    """Return whether `body` looks like a CreateJob request rather than one of our jobs."""
    return "JobSpecs" in body and "UserCommand" in body


def translate(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a job's fields, to be validated, and a line for everything that was not taken over, with the reason.

    Raises:
        SpecError: If the job is of a type or has roles that cannot be run, or a part has not the form DLC gives it.
    """
    rest, left_out = dict(body), list[str]()
    if (kind := rest.pop("JobType", "PyTorchJob")) != "PyTorchJob":
        raise SpecError(f"JobType {kind} cannot be taken over, only PyTorchJob. Write a job of this kind by hand.")
    job: dict[str, Any] = {"launch": "env", "name": _name(str(rest.pop("DisplayName", "")))}
    job["command"] = _command(str(rest.pop("UserCommand", "")))
    job |= _resources(_list(rest, "JobSpecs"), left_out)
    job["env"] = _variables(_table(rest, "Envs"), left_out)
    if "Priority" in rest:
        job["priority"] = rest.pop("Priority")
    if minutes := rest.pop("JobMaxRunningTimeMinutes", None):
        job["max_runtime"] = f"{minutes}m"
    job["code"] = _code(_table(rest, "CodeSource"), left_out)
    job["datasets"] = [_dataset(n, source, left_out) for n, source in enumerate(_list(rest, "DataSources"))]
    left_out += [
        f"{key} {_short(value)}: {_REASONS.get(key, 'nothing here is like it')}" for key, value in rest.items() if value
    ]
    return job, left_out


def _name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")


def _command(text: str) -> str:
    try:
        return parse_command(text.strip())
    except ValueError:
        return "bash -c " + shlex.quote(text)  # DLC runs the text in a shell


def _table(body: dict[str, Any], key: str) -> dict[str, Any]:
    table = body.pop(key, None) or {}
    if not isinstance(table, dict):
        raise SpecError(f"{key} is {_short(table)}, not fields by name as in a CreateJob request. Correct the file.")
    return dict(table)


def _list(body: dict[str, Any], key: str) -> list[dict[str, Any]]:
    items = body.pop(key, None) or []
    if not isinstance(items, list) or not all(isinstance(each, dict) for each in items):
        raise SpecError(f"{key} is {_short(items)}, not a list as in a CreateJob request. Correct the file.")
    return [dict(each) for each in items]


def _resources(specs: list[dict[str, Any]], left_out: list[str]) -> dict[str, Any]:
    """Return `resources` for pods that are all as large as the largest, and the image."""
    nodes, images, amounts = 0, list[str](), {"cpu": 0.0, "memory": 0, "gpu": 0}
    for number, spec in enumerate(specs):
        where = f"JobSpecs[{number}]"
        if (role := spec.pop("Type", "Worker")) not in _ROLES:
            raise SpecError(f"{where} has the role {role}; only {' and '.join(_ROLES)} can be taken over.")
        nodes += _number(where, "PodCount", spec.pop("PodCount", 1))
        images += [spec.pop("Image")] if spec.get("Image") else []
        config = _table(spec, "ResourceConfig")
        _take_larger(where, amounts, config, left_out)
        if "EcsSpec" in spec:
            left_out.append(f"{where}.EcsSpec {spec.pop('EcsSpec')}: say what it has, as --set resources.cpu=4")
        left_out += [
            f"{where}.{key} {_short(value)}: nothing here is like it" for key, value in (spec | config).items() if value
        ]
    left_out += [f"Image {image}: all nodes have one image, {images[0]}" for image in images[1:] if image != images[0]]
    resources = {"nodes": nodes, **{name: amount for name, amount in amounts.items() if amount}}
    return {"resources": resources} | ({"kubernetes": {"image": images[0]}} if images else {})


def _take_larger(where: str, amounts: dict[str, Any], config: dict[str, Any], left_out: list[str]) -> None:
    try:
        pod = {
            "cpu": float(config.pop("CPU", 0) or 0),
            "memory": to_bytes(memory) if (memory := config.pop("Memory", None)) else 0,
            "gpu": int(config.pop("GPU", 0) or 0),
        }
    except (ValueError, TypeError, OverflowError) as error:
        raise SpecError(f"{where}.ResourceConfig: {error}. Correct the file.") from None
    for name, amount in pod.items():
        if amounts[name] and amount != amounts[name]:
            left_out.append(f"{where}.ResourceConfig: all nodes get as much {name} as the largest")
        amounts[name] = max(amounts[name], amount)


def _number(where: str, key: str, value: Any) -> int:
    if not re.fullmatch(r"\d{1,6}", str(value)):
        raise SpecError(f"{where}.{key} is {_short(value)}, not a number. Correct the file.")
    return int(value)


def _variables(variables: dict[str, Any], left_out: list[str]) -> dict[str, str]:
    left_out += [f"Envs.{name}: every launch sets it" for name in variables if name in RESERVED_VARIABLES]
    return {name: str(value) for name, value in variables.items() if name not in RESERVED_VARIABLES}


def _code(source: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    identity, branch, commit = (source.pop(key, None) for key in ("CodeSourceId", "Branch", "Commit"))
    if mount := source.pop("MountPath", None):
        left_out.append(
            f"CodeSource.MountPath {mount}: the command starts in the code's folder; write its paths from there"
        )
    left_out += [f"CodeSource.{key} {_short(value)}: nothing here is like it" for key, value in source.items() if value]
    if not identity:
        left_out.append("CodeSource: there is none; the code is the folder of this file, unless --set code.path=FOLDER")
        return {"path": "."}
    name = _name(str(identity))
    left_out.append(f"CodeSource {identity}: its repository is not in the file; add it: phalanx code add {name}")
    return {"name": name} | ({"ref": commit or branch} if commit or branch else {})


def _dataset(number: int, source: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    identity, uri = source.pop("DataSourceId", None), str(source.pop("Uri", None) or "")
    name = _name(str(identity or f"data-{number}"))
    dataset: dict[str, Any] = {"name": name, "mount": source.pop("MountPath", None)}
    where = _where(uri, dataset["mount"])
    if source.get("MountAccess") == "RO" or (source.get("MountAccess") == "RW" and where and where["kind"] == "nas"):
        dataset["readonly"] = source.pop("MountAccess") == "RO"
    if where is None:
        address = f" ({uri})" if uri else ""
        left_out.append(
            f"DataSources[{number}]{address}: where it lies cannot be told; add it: phalanx dataset add {name}"
        )
    left_out += [
        f"DataSources[{number}].{key} {_short(value)}: nothing here is like it"
        for key, value in source.items()
        if value
    ]
    return dataset | (where or {})


def _where(uri: str, mount: str | None) -> dict[str, str] | None:
    """Return kind and address of what DLC calls by a `uri`, or None."""
    parts = urlsplit(uri)
    bucket, _, endpoint = parts.netloc.partition(".")
    if parts.scheme == "oss" and bucket and endpoint:
        return {"kind": "oss", "uri": f"oss://{bucket}/{parts.path.strip('/')}", "endpoint": f"https://{endpoint}"}
    if parts.scheme == "nas" and bucket and mount:
        return {"kind": "nas", "file_system": bucket, "uri": mount}
    return None


def _short(value: Any) -> str:
    return text if len(text := str(value)) <= 60 else text[:57] + "..."
