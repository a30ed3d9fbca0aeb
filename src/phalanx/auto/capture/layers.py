"""`Layers`: a captured model as the planner sees it: its calls and the strategies of each layer (pure)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phalanx.auto.capture.graph import CapturedStep
from phalanx.auto.capture.module_calls import CallInput, ModuleCall
from phalanx.auto.capture.operator_sites import find_operator_parts, operator_form
from phalanx.auto.capture.partition_points import PartitionPoints
from phalanx.auto.capture.sequence_blocks import SequenceBlocks
from phalanx.plan.styles import StyleName

ActivationState = Literal["whole", "features", "tokens"]
"""How an activation stands between layers whose ranks read the same samples: whole, or cut along the last dim, or along
the one before, in which the tokens of a sequence follow each other."""


class LayerStrategy(NamedTuple):
    """How a part of the model is computed."""

    style: StyleName | Literal["parts"] | None
    """Style of `px.shard`, or `parts`: its operators are placed, each computed in parts
    (`auto/capture/operator_sites`). None as it stands."""

    input_state: ActivationState = "whole"
    """How its input arrives."""

    output_state: ActivationState = "whole"
    """How its output leaves."""

    @property
    def has_sharded_input(self) -> bool:
        """Whether its input arrives cut along the last dim."""
        return self.input_state == "features"

    @property
    def has_sharded_output(self) -> bool:
        """Whether its output leaves cut along the last dim."""
        return self.output_state == "features"

    def input_state_of(self, source: CallInput) -> ActivationState:
        """Return how one of its inputs arrives; masks and the like may be replicated where activations are sharded."""
        if self.input_state == "features":
            return "features" if source.follows or self.style is not None else "whole"
        return self.input_state if isinstance(source.source, int) else "whole"

    def __str__(self) -> str:
        if self.style in (None, "sequence"):
            return {"whole": "whole", "features": "cut as it comes", "tokens": "on its tokens"}[self.input_state]
        source, target = _WORDS[self.input_state], _WORDS[self.output_state]
        return f"{self.style}{f' from {source}' if source else ''}{f' to {target}' if target else ''}"


_WORDS: dict[ActivationState, str] = {"whole": "", "features": "cut", "tokens": "tokens"}

_TOKENS_TOO: tuple[ActivationState, ...] = ("whole", "tokens")
_CUT_TOO: tuple[ActivationState, ...] = ("whole", "features")

WHOLE = LayerStrategy(None)
PARTS = LayerStrategy("parts")
EXPERTS = LayerStrategy("expert")
"""Each rank of a group holds some of the experts of a mixture; tokens travel to theirs and back."""

ALL_STRATEGIES = (
    WHOLE,
    LayerStrategy(None, "features", "features"),
    LayerStrategy(None, "tokens", "tokens"),
    LayerStrategy("sequence", "tokens", "tokens"),
    *(LayerStrategy("column", source, target) for source in _TOKENS_TOO for target in _CUT_TOO),
    *(LayerStrategy("row", source, target) for source in _CUT_TOO for target in _TOKENS_TOO),
    *(LayerStrategy("vocab", output_state=target) for target in _TOKENS_TOO),
    PARTS,
    EXPERTS,
)


class ShardedRegion(NamedTuple):
    """Layers between which activations stay cut."""

    parts: int
    """Number of ranks over which they are cut."""

    strategies: frozenset[tuple[int, LayerStrategy]]
    """By `ModuleCall.template`."""


class CallIndex:
    """Which calls are alike, and which call a module or read a parameter that others do too."""

    def __init__(self, calls: tuple[ModuleCall, ...]) -> None:
        self.alike: dict[int, list[ModuleCall]] = {}
        """By `ModuleCall.template`."""

        users: dict[str, set[str]] = {}
        for call in calls:
            self.alike.setdefault(call.template, []).append(call)
            for param in call.parameters:
                users.setdefault(param.name, set()).add(call.path)
        self.once = {path for path, count in Counter(call.path for call in calls).items() if count == 1}
        """Modules that run in one call."""

        self.shared = {name for name, paths in users.items() if len(paths) > 1}
        """Parameters of several modules."""

        self.ends = {call.template for call in calls if call.is_returned}
        """By `ModuleCall.template`: calls whose outputs leave the model, and so have to be replicated."""

        self._forms: dict[int, tuple[object, ...]] = {}

    def form(self, captured: CapturedStep, call: ModuleCall) -> tuple[object, ...]:
        """Return the form of a call's operators."""
        if call.template not in self._forms:
            self._forms[call.template] = operator_form(captured, call.operators)
        return self._forms[call.template]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """A captured model, and the optimizer it trains with."""

    captured: CapturedStep
    calls: tuple[ModuleCall, ...]
    shardable: frozenset[str]
    """Paths of the layers that can have a style."""

    optimizer: str = "sgd"
    """`sgd`, `momentum` or `adam`."""

    return_outputs: bool = True
    """Whether the loop keeps what the model returns. If not, it is let go of as soon as there is the loss; stages keep
    that of a micro-batch up to its backward pass."""

    blocks: tuple[str, ...] = ()
    """Paths of the repeated blocks, none inside another: what may be recomputed."""

    partition_points: PartitionPoints | None = None
    """Where the model may be split into stages; None if it cannot be."""

    sequence: SequenceBlocks | None = None
    """Blocks whose sequence several ranks may share; None if there are none."""

    sequence_obstacle: str | None = None
    """Why there are none."""

    operator_parts_cache: dict[tuple[object, int], bool] = field(default_factory=dict, compare=False, repr=False)
    """Whether so many ranks can compute parts of a call, by the form of its operators; kept over searches."""

    index: CallIndex = field(init=False, compare=False, repr=False)
    """Which calls repeat each other, and which modules are called once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", CallIndex(self.calls))

    @property
    def expert_degrees(self) -> tuple[int, ...]:
        """Numbers of ranks, above 1 and rising, that may hold one copy of some module's experts together."""
        counts = {call.experts.experts for call in self.calls if call.experts is not None}
        return tuple(ranks for ranks in range(2, max(counts, default=0) + 1) if any(n % ranks == 0 for n in counts))

    def has_parts(self, call: ModuleCall, ranks: int) -> bool:
        """Return whether so many ranks can compute parts of a call of a module, operator by operator."""
        key = self.index.form(self.captured, call), ranks
        if key not in self.operator_parts_cache:
            self.operator_parts_cache[key] = find_operator_parts(self.captured, call.operators, ranks) is not None
        return self.operator_parts_cache[key]
