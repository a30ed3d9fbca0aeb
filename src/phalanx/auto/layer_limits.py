"""Apply the user's `limits` on layers and on the parallel config to a captured model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from phalanx.auto.capture.layers import ALL_STRATEGIES, LayerStrategy
from phalanx.auto.capture.module_calls import ModuleCall
from phalanx.auto.search.request import (
    PLAN_KNOBS,
    Limit,
    is_config_limit,
    read_layer_limit,
    read_limit,
)
from phalanx.errors import ConfigError, PlanError
from phalanx.i18n import suggest, tr
from phalanx.parallel.tensor.expert_modules import EXPERTS_KIND
from phalanx.plan.value import matches

_STYLED_KIND = {"column": "Linear", "row": "Linear", "vocab": "Embedding"}
"""The kind of layer that a style applies to."""

_MOST_NAMES = 8


def read_limits(
    limits: tuple[str, ...], calls: tuple[ModuleCall, ...]
) -> tuple[list[Limit], frozenset[tuple[int, LayerStrategy]]]:
    """Return limits of the config, and the strategies that limits of layers exclude."""
    config_limits: list[Limit] = []
    excluded: set[tuple[int, LayerStrategy]] = set()
    paths = {call.path: call.template for call in calls if not call.is_glue}
    for word in limits:
        if is_config_limit(word):
            config_limits.append(read_limit(word, PLAN_KNOBS))
            continue
        name, style = read_layer_limit(word)
        matching = {like for path, like in paths.items() if matches(name, path)}
        if not matching:
            raise ConfigError(
                tr(
                    "Invalid limit {said!r}: the model calls no layer {layer!r}.{nearest} It calls {known}.",
                    said=word,
                    layer=name,
                    nearest=suggest(name, paths),
                    known=format_names(paths),
                )
            )
        _check_kinds(word, style, [call for call in calls if call.template in matching])
        excluded |= {
            (like, strategy) for like in matching for strategy in ALL_STRATEGIES if (strategy.style or "whole") != style
        }
    return config_limits, frozenset(excluded)


def _check_kinds(limit: str, style: str, calls: Iterable[ModuleCall]) -> None:
    """Raise unless layers are of the kind that this style applies to."""
    able = _STYLED_KIND.get(style) or (EXPERTS_KIND if style == "expert" else None)
    wrong = None if able is None else next((call for call in calls if not _has_kind(call, style)), None)
    if wrong is not None:
        why = (
            tr(
                " The loss is planned on whole logits. To cut head and loss, px.shard(model, {{{layer!r}: 'vocab'}}) "
                "with px.vocab_cross_entropy or px.SoftmaxCrossEntropyExpand.",
                layer=wrong.path,
            )
            if (style, wrong.kind) == ("vocab", "Linear")
            else ""
        )
        raise PlanError(
            tr(
                "Invalid limit {said!r}: {layer!r} is a {kind}, and {style!r} is a style of {able}. Use another.{why}",
                said=limit,
                layer=wrong.path,
                kind=wrong.kind,
                style=style,
                able=able,
                why=why,
            )
        )


def _has_kind(call: ModuleCall, style: str) -> bool:
    return call.experts is not None if style == "expert" else call.kind == _STYLED_KIND[style]


def format_names(names: Collection[str]) -> str:
    """Return names of layers, of many the first."""
    shown, more = ", ".join(islice(names, _MOST_NAMES)), len(names) - _MOST_NAMES
    return tr("{names} and {count} more", names=shown, count=more) if more > 0 else shown
