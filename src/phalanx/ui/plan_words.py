"""`translate_picture`: the Chinese of the words in a Plan's picture (pure); names of the model stay as they are."""

from __future__ import annotations

import re
from xml.sax.saxutils import unescape

from rich.cells import cell_len

from phalanx.i18n.translation import Placeholder, Sentences, Translator
from phalanx.plan.report.picture import fit

_EFFECTS: Sentences = (
    "the forward pass and the loss are compiled",
    "the forward pass runs in mixed precision",
    "activation checkpointing: named modules are recomputed in the backward pass",
    "gradient accumulation: several batches make one update",
    "ranks take local steps and average their parameters",
    "ranks take local steps and average their parameters, less often while the loss is high",
    "the step of each parameter follows its norm and its gradient's",
    "the step of each parameter follows its norm and its update's",
    "only the largest entries of gradients are sent",
    "gradients are sent in float16",
    "gradients are added up within each host first",
    "batch normalisation over the samples of all ranks",
    "each rank holds a part of optimizer state, gradients and parameters",
    "each rank computes some stages of the model",
    "layers that px.shard names are sharded over ranks",
    "modules that px.shard names compute a part of the sequence on each rank",
    "modules that px.shard names have some of their experts on each rank; tokens travel to theirs",
    "gradients are clipped before the update",
    "an EMA of the weights is kept; px.ema_of(model) returns it",
    "gradients are summed, not averaged",
    "each rank keeps its own initial parameters",
    "one all-reduce per gradient",
    "stay as they are",
    "its table is in this process: the job has one worker and no server",
    "dense parameters live on the servers; buffers are each worker's own",
    "dense parameters live on every worker, equal by all-reduce",
    "each gathers the samples of all ranks",
    "their ranks read the same samples",
    "each rank holds some experts, and tokens travel to theirs",
    "each rank computes {part} of every global batch",
    "each of {n} replicas computes {part} of every global batch, on whichever rank holds it",
    "workers push to the servers in mode {mode} ({n} steps)",
    "workers push to the servers in mode {mode}",
    "faster ranks get more of each global batch, about {split}",
    "predicted {ms} ms a step of {n} rows, {mib} MiB a rank",
)
"""What settings of the Plan lead to."""

_SETTINGS: Sentences = (
    "world size {n}",
    "{n} server",
    "{n} servers",
    "no a_sync",
    "px.shard over {axes}",
    "{n} parameters without requires_grad",
)

_PHRASES: Sentences = (
    "parameters",
    "live",
    "updated by",
    "MiB (dark: on a rank)",
    "replicated",
    "this rank",
    "a shard, held by its layer",
    "nothing (frozen)",
    "its own rank, gradient scaled",
    "reduce scatter",
    "average",
    "top k",
    "Plan over {mesh}",
    "a rank holds {mib} MiB of parameters; {n} all-reduces of {sent} MiB a step",
    "stage {stage} on rank {n} of its axis: {layers}",
    "{n} server, table {table}",
    "{n} servers, table {table}",
    "this process, table {table}",
    "cut over {axes} by its layer",
    "all-reduce ({mean}) in buckets of {mib} MiB",
    "push ({mode}, {n} steps)",
    "push ({mode})",
    "{reason} (one rank: nothing to do)",
    "{setting}: {styled} are sharded over ranks; {effect}",
    "planner: {plan}: {predicted}",
)


def _layers(text: str) -> str:
    """Return names of layers with their styles in Chinese; where only some are named, with the number of all."""
    text = re.sub(r"(^|, )the model \(", r"\1整个模型 (", text)
    if match := re.fullmatch(r"(.+) and (\d+) more", text):
        return f"{match[1]} 等 {match[1].count(', ') + 1 + int(match[2])} 层"
    return f"{text} "


def _mesh(text: str) -> str:
    return "单个进程" if text == "one rank" else text


def _shards(text: str) -> str:
    """Return `shard over data, shard over model` in Chinese."""
    return "，".join(f"沿 {axis} 分片" for axis in re.findall(r"over (\w+)", text))


def _split(text: str) -> str:
    return re.sub(r": (\d+) each", r" 各 \1", text).replace(", ", "，")


def _effect(text: str) -> str:
    return _translate_effect(text) or text


def _setting(text: str) -> str:
    return _translate_setting(text) or text


def translate_words(text: str) -> str:
    """Return words of a Plan's picture in Chinese; those of the model are returned as they are."""
    if _SHARDS.fullmatch(text):
        return _shards(text)
    if (chinese := _translate_phrase(text)) is not None:
        return chinese
    setting, _, effect = text.partition(": ")
    chinese = _translate_effect(effect)
    return text if chinese is None else f"{_setting(setting)}：{chinese}"


_SHARDS = re.compile(r"shard over \w+(?:, shard over \w+)*")

_PLACEHOLDERS = {
    "mesh": Placeholder(translate=_mesh),
    "split": Placeholder(translate=_split),
    "styled": Placeholder(translate=_layers),
    "effect": Placeholder(translate=_effect),
    "predicted": Placeholder("predicted .+", _effect),
    "reason": Placeholder(".+: .+", translate_words),
    "setting": Placeholder(".+?", _setting),
    "part": Placeholder(r"1/\d+"),
    **dict.fromkeys(("mode", "mean"), Placeholder(r"\w+")),
    **dict.fromkeys(("n", "stage"), Placeholder(r"\d+")),
    **dict.fromkeys(("ms", "mib", "sent", "table"), Placeholder(r"\S+")),
}

_translate_effect = Translator(_EFFECTS, _PLACEHOLDERS)
_translate_setting = Translator(_SETTINGS, _PLACEHOLDERS)
_translate_phrase = Translator(_PHRASES, _PLACEHOLDERS)


def translate_picture(svg: str) -> str:
    """Return a Plan's picture with its words in Chinese, cut to the widths of those before."""
    return _TEXT.sub(lambda m: f"{m['tag']}{_translate_content(m['whole'], m['shown'])}</text>", svg)


_TEXT = re.compile(r"(?P<tag><text\b[^>]*>)(?:<title>(?P<whole>[^<]*)</title>)?(?P<shown>[^<]*)</text>")


def _translate_content(whole: str | None, shown: str) -> str:
    chinese = translate_words(unescape(shown if whole is None else whole))
    return fit(chinese, cell_len(chinese if whole is None else unescape(shown)))
