"""`SearchRequest` and `Limit`: model, cluster and user limits of a search."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from phalanx.auto.cost.parallel_config import ATTENTION, RECOMPUTE, SCHEDULES
from phalanx.auto.predict.run_file import read_run
from phalanx.auto.predict.run_parts import ORDERS
from phalanx.auto.predict.run_spec import RunSpec
from phalanx.cluster.spec.cluster import Cluster, read_cluster
from phalanx.errors import ConfigError
from phalanx.i18n import Labels, suggest, tr
from phalanx.units import parse_bytes

_SHARED = ("tp", "pp", "dp", "vpp", "zero", "micro", "recompute")

KNOBS = (*_SHARED, "order")
"""What a search chooses for a run spec, and what limits may name; `micro` is the sequences of a micro-batch."""

PLAN_KNOBS = (*_SHARED, "schedule", "ep", "cp", "attention")
"""The same of a search for a module; `micro` is how many micro-batches stages pass on. The schedule of a run spec
is part of its description."""

_FIXED: Labels = {
    "cp": "every choice has {knob}=1, and px.predict prices a run with another",
    "ep": "every choice has {knob}=1, and px.predict prices a run with another",
    "hsdp": "every choice has {knob}=1, and px.predict prices a run with another",
    "schedule": "it is the file's, so write another there",
    "sequence_parallel": "it is on wherever tp is above 1",
}
"""What a run spec has besides, which is not searched, and the message that says why."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": RECOMPUTE,
    "schedule": SCHEDULES,
    "order": ORDERS,
    "attention": ATTENTION,
}

STYLES = ("whole", "column", "row", "vocab", "sequence", "parts", "expert")
"""How a limit may have layers computed."""

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing the user fixed, such as `tp<=8` or `recompute=full`."""

    knob: str
    compare: str
    value: int | str

    def allows(self, values: Mapping[str, int | str]) -> bool:
        """Return whether a choice keeps to it."""
        return _COMPARE[self.compare](values[self.knob], self.value)

    def __str__(self) -> str:
        return f"{self.knob}{self.compare}{self.value}"


def is_config_limit(word: str) -> bool:
    """Return whether a limit begins with a knob, and so is not one of layers."""
    return re.split(r"[<>=\s]", word.strip())[0] in PLAN_KNOBS


def read_limit(word: str, knobs: tuple[str, ...] = KNOBS) -> Limit:
    """Return a limit from words.

    Args:
        word: Such as `tp<=8`.
        knobs: What it may name.

    Raises:
        ConfigError: If it names no knob, or compares with something that cannot be.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|=)\s*(\w[\w-]*)\s*", word)
    if match is None:
        raise ConfigError(
            tr(
                "Invalid limit {said!r}. Write a knob ({knobs}), one of <=, >= and =, and a value, such as "
                "tp<=8.{nearest}",
                said=word,
                knobs=", ".join(knobs),
                nearest="",
            )
        )
    knob, compare, value = match.groups()
    if knob not in knobs and knobs == KNOBS and knob in _FIXED:
        why = tr(_FIXED[knob], knob=knob)
        raise ConfigError(
            tr(
                "Asked for the limit {said!r}, and {knob} is not searched: {why}. Limits may be on {knobs}.",
                said=word,
                knob=knob,
                why=why,
                knobs=", ".join(knobs),
            )
        )
    if knob not in knobs:
        raise ConfigError(
            tr(
                "Invalid limit {said!r}. Write a knob ({knobs}), one of <=, >= and =, and a value, such as "
                "tp<=8.{nearest}",
                said=word,
                knobs=", ".join(knobs),
                nearest=suggest(knob, knobs),
            )
        )
    if knob in _CHOICES:
        if compare != "=" or value not in _CHOICES[knob]:
            raise ConfigError(
                tr(
                    "Invalid limit {said!r}. Write {knob}= and one of {known}.",
                    said=word,
                    knob=knob,
                    known=", ".join(_CHOICES[knob]),
                )
            )
        return Limit(knob, compare, value)
    if not value.isdigit():
        raise ConfigError(
            tr(
                "Invalid limit {said!r}: the value is not an integer. Write one, such as {knob}<=8.",
                said=word,
                knob=knob,
            )
        )
    if knob == "zero" and int(value) > 3:
        raise ConfigError(
            tr("Invalid limit {said!r}. Write {knob}= and one of {known}.", said=word, knob=knob, known="0, 1, 2, 3")
        )
    return Limit(knob, compare, int(value))


def read_layer_limit(limit: str) -> tuple[str, str]:
    """Return which layers a limit is on, and how they are to be computed, such as `classifier.*` and `whole`.

    Raises:
        ConfigError: If it says neither; whether there are such layers is for who has the model.
    """
    name, _, style = (word.strip() for word in limit.partition("="))
    if style not in STYLES:
        hint = suggest(style, STYLES) or suggest(re.split(r"[<>]", name)[0], PLAN_KNOBS)
        words = {"knobs": ", ".join(PLAN_KNOBS), "styles": ", ".join(STYLES)}
        raise ConfigError(
            tr(
                "Invalid limit {said!r}. Write a knob ({knobs}) and a value, such as tp<=2, or a layer and one of "
                "{styles}, such as classifier.*=whole.{nearest}",
                said=limit,
                **words,
                nearest=hint,
            )
        )
    return name, style


def read_size(value: float | str) -> float | None:
    """Return bytes from a number, or from text such as `8GiB`, `8Gi`, `500 MiB` and `8GB`; None if it is neither."""
    if isinstance(value, int | float):
        return None if isinstance(value, bool) else value
    return parse_bytes(str(value), any_case=True)


def check_arguments(model: Any, limits: Any, memory: float | None, top_k: int) -> None:
    """Raise if what a planner is asked for could never be.

    Raises:
        ConfigError: Says what was found, and what to hand in.
    """
    if not callable(getattr(model, "named_modules", None)):
        raise ConfigError(
            tr("auto_parallel takes a torch.nn.Module, got {found}. Pass the model itself.", found=type(model).__name__)
        )
    if isinstance(limits, str):
        raise ConfigError(tr("limits takes a list, got {said!r}. Write limits=[{said!r}].", said=limits))
    for name, value in (("memory", memory), ("top_k", top_k)):
        if value is not None and not value > 0:
            raise ConfigError(
                tr("auto_parallel was asked for {name}={value}. Give a number above 0.", name=name, value=value)
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """A model to train on a cluster of equal nodes, within limits."""

    base: RunSpec
    """The run that every choice changes: all devices, no parallelism."""

    limits: tuple[Limit, ...]

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        return self.base.cluster.per_node * self.base.cluster.nodes


def read_request(
    described: Mapping[str, Any], cluster: str | Cluster | None, limits: Iterable[str | Limit] = ()
) -> SearchRequest:
    """Return a job, checked.

    Args:
        described: A run as `phalanx predict` takes it; what the search chooses (`parallel`, `batch.micro`,
            `recompute`) may be left out and does not count.
        cluster: Words or a cluster; that of `described` when None. Without a price it costs what that one does.
        limits: What is fixed, such as `tp<=8`.

    Raises:
        ConfigError: If something is missing or cannot be.
    """
    run = dict(described)
    if cluster is not None:
        run["cluster"] = _priced(read_cluster(cluster), run.get("cluster"))
    if "cluster" not in run:
        raise ConfigError(tr("A search needs a cluster, found none. Give --cluster, such as h100x8,nodes=16."))
    batch = dict(run["batch"]) if isinstance(run.get("batch"), Mapping) else {}
    run |= {"name": run.get("name", "job"), "parallel": {}, "batch": {**batch, "micro": 1}, "recompute": "none"}
    run.setdefault("precision", "bf16")
    if not run.get("software"):
        run.setdefault("stack", "pytorch")  # what Phalanx trains with
    read = [limit if isinstance(limit, Limit) else read_limit(limit) for limit in limits]
    return SearchRequest(base=read_run(run, str(run["name"])), limits=tuple(read))


def _priced(cluster: Cluster, described: Any) -> Cluster:
    """Return a cluster with its price, or that of the one which a run describes."""
    if cluster.usd_per_device_hour is not None:
        return cluster
    own = described.get("usd_per_device_hour") if isinstance(described, Mapping) else None
    if isinstance(described, str | Cluster):
        with suppress(ConfigError):  # it is not asked for
            own = read_cluster(described).usd_per_device_hour
    return cluster if own is None else replace(cluster, usd_per_device_hour=own)
