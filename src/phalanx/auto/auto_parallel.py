"""`px.auto_parallel`: capture a model, find its fastest Plan on a cluster, and say how good that is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from phalanx.auto.capture.graph import Captured
from phalanx.auto.capture.layers import EVERY_WAY, Layers, Region, Way
from phalanx.auto.capture.module_calls import Segment, segments
from phalanx.auto.capture.shape_check import cannot_run_cut, may_be_cut
from phalanx.auto.capture.step import capture
from phalanx.auto.cost.machine_model import STATES, Speed, speed_of_devices, speed_of_machine
from phalanx.auto.cost.parallel_config import Arrangement
from phalanx.auto.cost.segment_work import LayerWork
from phalanx.auto.planner.planner import Candidate, NothingFitsError, Searched, arrangements_of, search_plans
from phalanx.auto.planner.result import Planned
from phalanx.auto.planner.to_plan import check_base
from phalanx.auto.planner.unsupported import (
    left_out_in_stages,
    left_out_of_limits,
    none_left,
    pieces_or_why,
    why_unsharded,
    why_unsplit,
)
from phalanx.auto.predict.prediction import USABLE
from phalanx.auto.search.request import PLAN_KNOBS, Limit, check_asked, is_of_arrangement, read_layer_limit, read_limit
from phalanx.auto.units import read_size, some
from phalanx.cluster.messages.messages import meant, text
from phalanx.cluster.spec.cluster import Cluster, read_cluster
from phalanx.data.loader.binding import LossFunction
from phalanx.errors import ConfigError, PlanError
from phalanx.plan.value import matches
from phalanx.strategy import DistributedStrategy


def auto_parallel(
    model: nn.Module,
    sample: Any,
    loss_fn: LossFunction | None = None,
    *,
    cluster: str | Cluster | None = None,
    optimizer: Optimizer | str = "adam",
    limits: Iterable[str] = (),
    memory: float | str | None = None,
    strategy: DistributedStrategy | None = None,
    top_k: int = 5,
    time_limit: float | None = None,
    alternatives: Iterable[str] = (),
) -> Planned:
    """Return the fastest Plan to train a model on a cluster, with a proof of how good it is.

    Not collective, and needs no device of the cluster: the model is captured under fake tensors, where it is.

    Args:
        model: A plain module.
        sample: One global batch, as `phalanx.auto.capture.step` takes it: with a loss, its last column is the target.
            Only shapes and dtypes count.
        loss_fn: Takes the model's output and the target.
        cluster: Words such as `h100x8,nodes=16`, `herex2` or `cpux2`, a file, or a cluster; when None, in a job the
            ranks of it (`px.auto_parallel`), else this host, as measured by `phalanx calibrate`.
        optimizer: The optimizer that trains the model, or one of `sgd`, `momentum` and `adam`.
        limits: What is fixed: of the arrangement, `tp<=2`, `dp=4`, `zero=0`, `recompute=none`; of layers,
            `classifier.*=whole`, or `column`, `row`, `vocab`. Repeated blocks are cut alike: a limit on one is on all.
        memory: Bytes that a rank may use, or words such as `8GiB`; what the cluster's devices have when None.
        strategy: Settings of everything that the planner does not decide, such as `amp`.
        top_k: Arrangements of which the fastest Plan is proved.
        time_limit: Seconds after which the best so far is returned with its gap.
        alternatives: Limits that the answer's `why_not` will be asked for, so that a wrong word is an error before the
            search and not after it.

    Raises:
        ConfigError: If the model cannot be captured, or something asked for is not known.
        PlanError: If no Plan fits; says how many bytes every one needs. If the model makes sparse gradients.
    """
    base = strategy or DistributedStrategy()
    check_base(base)
    _check_numbers(top_k, time_limit)
    given = None if memory is None else _bytes_of(memory)
    check_asked(model, limits, given, top_k)
    found = read_cluster("here" if cluster is None else cluster).weakest()
    room = USABLE * found.nodes[0].device.memory if given is None else given
    _check_sparse(model)
    captured = capture(model, sample, loss_fn)
    found_segments, said = segments(captured), tuple(limits)
    _read_limits((*said, *alternatives), found_segments)
    pieces, unstaged = pieces_or_why(model, captured, found_segments)
    unsharded = why_unsharded(captured)
    layers = Layers(
        captured=captured,
        segments=found_segments,
        may_be_cut=may_be_cut(model),
        pieces=pieces,
        optimizer=_kind_of(optimizer),
        blocks=_outermost(captured.blocks),
    )
    speed = speed_of(found, _precision(captured, base))
    work = LayerWork(captured, found_segments, layers.blocks, speed.operators)
    unsplit = why_unsplit(layers, base)
    search = _Search(
        model, sample, loss_fn, found, speed, room, top_k, time_limit, layers, work, unstaged, unsharded, unsplit
    )
    searched = search(said)
    whole_loss = None if loss_fn is None or found.devices == 1 else text("left out cut loss")
    in_stages = left_out_in_stages(searched.arrangements, unsplit)
    not_tried = (unstaged, *unsharded.values(), *_apart(search), *in_stages, whole_loss)
    return Planned(
        searched=searched,
        layers=search.layers,
        work=work,
        speed=speed,
        room=room,
        where=str(found),
        base=base,
        left_out=tuple(dict.fromkeys(why for why in not_tried if why is not None)),
        search_again=lambda more: search((*said, *more)),
        alone=lambda: search.alone_s(given),
        usd_per_hour=found.usd_per_hour,
    )


def _check_numbers(top_k: object, time_limit: object) -> None:
    if not isinstance(top_k, int):
        raise ConfigError(text("not above zero", name="top_k", value=top_k))
    if time_limit is not None and not (isinstance(time_limit, int | float) and time_limit >= 0):
        raise ConfigError(text("no seconds", name="time_limit", value=time_limit))


def _bytes_of(memory: float | str) -> float:
    found = read_size(memory)
    if found is None:
        raise ConfigError(text("no bytes", name="memory", value=memory))
    return found


def _apart(search: _Search) -> tuple[str, ...]:
    return () if search.layers.on_tokens else (text("left out tokens"),)


def _check_sparse(model: nn.Module) -> None:
    sparse = (name for name, module in model.named_modules() if getattr(module, "sparse", None) is True)
    name = next(sparse, None)
    if name is not None:
        raise PlanError(text("sparse gradients", name=name))


def speed_of(cluster: Cluster, precision: str) -> Speed:
    """Return the speed of a cluster: as measured where it was, else by its devices' data sheets."""
    if cluster.measured is not None:
        return speed_of_machine(cluster.measured.at(cluster.devices))
    return speed_of_devices(cluster, precision)


def _precision(captured: Captured, strategy: DistributedStrategy) -> str:
    """Return what products are computed in."""
    dtype = strategy.amp_dtype if strategy.amp else next((p.dtype for p in captured.parameters), "float32")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")


_KIND_OF = {"column": "Linear", "row": "Linear", "vocab": "Embedding"}
"""The kind of layers that a way is of."""


@dataclass
class _Search:
    """A search of one model, which learns over several what of it does not run on cut activations."""

    model: nn.Module
    sample: Any
    loss_fn: LossFunction | None
    cluster: Cluster
    speed: Speed
    room: float
    top_k: int
    time_limit: float | None
    layers: Layers
    work: LayerWork
    unstaged: str | None
    """Why it is not in stages, where it cannot be."""

    unsharded: Mapping[bool, str]
    """Why it is not sharded, with stages and without, where it cannot be."""

    unsplit: str | None
    """Why gradients of its weights cannot be computed after those of inputs; None if they can be."""

    runs: dict[Region, bool] = field(default_factory=dict)

    def __call__(self, limits: tuple[str, ...]) -> Searched:
        """Search, and search again without the ways that do not run, until all that was found does."""
        shape, unwanted = _read_limits(limits, self.layers.segments)
        stop = None if self.time_limit is None else time.monotonic() + self.time_limit
        arrangements = [at for at in self._arrangements() if all(one.allows(_knobs(at)) for one in shape)]
        if not arrangements:
            raise PlanError(none_left(limits, left_out_of_limits(shape, self.unstaged, self.unsharded, self.unsplit)))
        while True:
            layers = replace(self.layers, unwanted=unwanted)
            found: Searched | NothingFitsError
            try:
                found = search_plans(
                    layers,
                    self.work,
                    arrangements,
                    self.speed,
                    room=self.room,
                    top_k=self.top_k,
                    time_limit=None if stop is None else stop - time.monotonic(),
                    limits=limits,
                )
            except NothingFitsError as error:
                found = error
            told = found.candidates if isinstance(found, Searched) else (found.least,)
            failing = {region for one in told for region in self._failing(one)}
            if not failing:
                if isinstance(found, Searched):
                    return found
                raise PlanError(str(found))
            # Other ways that leave tokens apart would most likely meet the same code.
            apart = {region for region in failing if any("tokens" in (way.takes, way.gives) for _, way in region.ways)}
            self.layers = replace(
                self.layers,
                failing=self.layers.failing | (failing - apart),
                on_tokens=self.layers.on_tokens and not apart,
            )

    def alone_s(self, memory: float | None) -> float | None:
        """Return the seconds of a step of one process alone, where that was measured; None too if it does not fit.

        Args:
            memory: Bytes that it may use; those of the machine when None.
        """
        measured, blocks = self.cluster.measured, self.layers.blocks
        if measured is None or 1 not in measured.rates or self.cluster.devices == 1:
            return None
        layers, speed = replace(self.layers, unwanted=frozenset()), speed_of_machine(measured.at(1))
        work = LayerWork(layers.captured, layers.segments, blocks, speed.operators)
        one = arrangements_of(1, has_blocks=bool(blocks), rows=_rows(layers.segments))
        room = USABLE * measured.memory if memory is None else memory
        try:
            return search_plans(layers, work, one, speed, room=room, top_k=1, time_limit=self.time_limit).best.seconds
        except PlanError:
            return None

    def _arrangements(self) -> Iterator[Arrangement]:
        pieces = self.layers.pieces
        found = arrangements_of(
            self.cluster.devices,
            has_blocks=bool(self.layers.blocks),
            per_node=self.cluster.nodes[0].devices,
            pieces=1 if pieces is None else len(pieces.starts),
            rows=_rows(self.layers.segments),
            may_split=self.unsplit is None,
        )
        return (at for at in found if not at.zero or (at.stages > 1) not in self.unsharded)

    def _failing(self, candidate: Candidate) -> Iterator[Region]:
        """Yield regions of a candidate in which the model's code needs activations whole that are cut."""
        for places in _regions(self.layers.segments, candidate.picked):
            ways = {segment.path: way for segment, way in places if way.style is not None}
            parts = candidate.arrangement.model
            region = Region(parts, frozenset((segment.like, way) for segment, way in places))
            if region not in self.runs:
                self.runs[region] = cannot_run_cut(self.model, self.sample, self.loss_fn, ways, parts) is None
            if not self.runs[region]:
                yield region


def _regions(found: tuple[Segment, ...], picked: tuple[Way, ...]) -> list[list[tuple[Segment, Way]]]:
    """Return runs of segments that hand activations to each other cut."""
    region: dict[int, int] = {}
    for place, (segment, way) in enumerate(zip(found, picked, strict=True)):
        if way.takes == way.gives == "whole":
            continue
        region[place] = place
        for source in segment.inputs:
            if way.takes_of(source) != "whole":
                assert isinstance(source.source, int)
                joined = region[source.source]
                region = {one: region[place] if root == joined else root for one, root in region.items()}
    roots = dict.fromkeys(region.values())
    return [[(found[one], picked[one]) for one, root in region.items() if root == chosen] for chosen in roots]


def _knobs(at: Arrangement) -> dict[str, int | str]:
    return {
        "dp": at.data,
        "tp": at.model,
        "pp": at.stages,
        "vpp": at.virtual,
        "zero": at.zero,
        "micro": at.micro_batches,
        "schedule": at.schedule,
        "recompute": at.recompute,
    }


def _read_limits(limits: tuple[str, ...], found: tuple[Segment, ...]) -> tuple[list[Limit], frozenset[tuple[int, Way]]]:
    """Return limits of the arrangement, and the ways that limits of layers leave out."""
    shape: list[Limit] = []
    unwanted: set[tuple[int, Way]] = set()
    paths = {segment.path: segment.like for segment in found if not segment.is_glue}
    for said in limits:
        if is_of_arrangement(said):
            shape.append(read_limit(said, PLAN_KNOBS))
            continue
        name, style = read_layer_limit(said)
        matching = {like for path, like in paths.items() if matches(name, path)}
        if not matching:
            raise ConfigError(
                text("limit of no layer", said=said, layer=name, nearest=meant(name, paths), known=some(paths))
            )
        _check_kinds(said, style, [segment for segment in found if segment.like in matching])
        unwanted |= {(like, way) for like in matching for way in EVERY_WAY if (way.style or "whole") != style}
    return shape, frozenset(unwanted)


def _check_kinds(said: str, style: str, asked: Iterable[Segment]) -> None:
    """Raise unless layers are of the kind that has this way at all."""
    able = _KIND_OF.get(style)
    wrong = None if able is None else next((one for one in asked if one.kind != able), None)
    if wrong is not None:
        why = text("limit of a head", layer=wrong.path) if (style, wrong.kind) == ("vocab", "Linear") else ""
        raise PlanError(
            text("limit of another kind", said=said, layer=wrong.path, kind=wrong.kind, style=style, able=able, why=why)
        )


def _rows(found: tuple[Segment, ...]) -> int:
    """Return the rows of the sample; 0 if no tensor of it is read."""
    shapes = (s.value.shape for one in found for s in one.inputs if isinstance(s.source, str) and "sample" in s.source)
    return next((shape[0] for shape in shapes if shape), 0)


def _kind_of(optimizer: Optimizer | str) -> str:
    if isinstance(optimizer, str):
        if optimizer not in STATES:
            raise ConfigError(text("unknown optimizer", said=optimizer, known=", ".join(STATES)))
        return optimizer
    group: Mapping[str, Any] = optimizer.param_groups[0]
    if "betas" in group:
        return "adam"
    return "momentum" if group.get("momentum") else "sgd"


def _outermost(blocks: Iterable[Iterable[str]]) -> tuple[str, ...]:
    paths = sorted({path for group in blocks for path in group}, key=len)
    kept: list[str] = []
    for path in paths:
        if not any(path.startswith(f"{outer}.") for outer in kept):
            kept.append(path)
    return tuple(kept)
