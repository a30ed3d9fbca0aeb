"""`translate_picture`: the Chinese of the words in a Plan's picture (pure); names of the model stay as they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.sax.saxutils import unescape

from rich.cells import cell_len

from phalanx.plan.report.picture import fit

_EFFECTS = {
    "the forward pass and the loss are compiled": "编译前向计算与损失",
    "the forward pass runs in mixed precision": "前向计算使用混合精度",
    "activation checkpointing: named modules are recomputed in the backward pass": "激活重计算：反向时重算指定模块",
    "gradient accumulation: several batches make one update": "梯度累积：多个批更新一次",
    "ranks take local steps and average their parameters": "各进程先做本地更新，再平均参数",
    "ranks take local steps and average their parameters, less often while the loss is high": (
        "各进程先做本地更新，再平均参数；损失较高时平均得较少"
    ),
    "the step of each parameter follows its norm and its gradient's": "各参数的步长由其范数与梯度范数决定",
    "the step of each parameter follows its norm and its update's": "各参数的步长由其范数与更新量的范数决定",
    "only the largest entries of gradients are sent": "只发送梯度中绝对值最大的元素",
    "gradients are sent in float16": "以 float16 发送梯度",
    "gradients are added up within each host first": "先在每台主机内汇总梯度",
    "batch normalisation over the samples of all ranks": "按所有进程的样本做批归一化",
    "each rank holds a part of optimizer state, gradients and parameters": "每个进程持有一部分优化器状态、梯度与参数",
    "each rank computes some stages of the model": "每个进程计算模型的若干阶段",
    "layers that px.shard names are sharded over ranks": "px.shard 指定的层切分到各进程",
    "modules that px.shard names compute a part of the sequence on each rank": (
        "px.shard 指定的模块在每个进程上计算序列的一部分"
    ),
    "modules that px.shard names have some of their experts on each rank; tokens travel to theirs": (
        "px.shard 指定的模块在每个进程上有部分专家；token 发往各自的专家"
    ),
    "gradients are clipped before the update": "更新前裁剪梯度",
    "an EMA of the weights is kept; px.ema_of(model) returns it": "保留权重的 EMA；px.ema_of(model) 返回它",
    "gradients are summed, not averaged": "梯度求和，不求平均",
    "each rank keeps its own initial parameters": "每个进程保留自己的初始参数",
    "one all-reduce per gradient": "每个梯度各做一次 all-reduce",
    "stay as they are": "保持不变",
    "its table is in this process: the job has one worker and no server": (
        "表在本进程中：作业只有一个工作进程，没有参数服务器"
    ),
    "dense parameters live on the servers; buffers are each worker's own": "稠密参数在参数服务器上；缓冲区归各工作进程",
    "dense parameters live on every worker, equal by all-reduce": "每个工作进程都有稠密参数，由 all-reduce 保持一致",
    "each gathers the samples of all ranks": "各层收集所有进程的样本",
    "their ranks read the same samples": "其进程读取相同的样本",
    "each rank holds some experts, and tokens travel to theirs": "每个进程持有部分专家，token 发往各自的专家",
}
"""What settings of the Plan lead to."""

_FIXED = {
    "parameters": "参数",
    "live": "位置",
    "updated by": "更新方式",
    "MiB (dark: on a rank)": "MiB（深色：单个进程所持）",
    "replicated": "每个进程一份",
    "this rank": "本进程",
    "a shard, held by its layer": "一个分片，由所在层持有",
    "nothing (frozen)": "不更新（已冻结）",
    "its own rank, gradient scaled": "所在进程，梯度已缩放",
    "reduce scatter": "reduce-scatter",
    "average": "平均参数",
    "top k": "top-k 压缩",
}

_PHRASES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), chinese)
    for pattern, chinese in (
        (r"Plan over (.+)", lambda m: f"并行方案：{'单个进程' if m[1] == 'one rank' else m[1]}"),
        (
            r"a rank holds (\S+) MiB of parameters; (\d+) all-reduces of (\S+) MiB a step",
            lambda m: f"每个进程持有 {m[1]} MiB 参数；每步 {m[2]} 次 all-reduce，{m[3]} MiB",
        ),
        (r"stage (\d+) on rank (\d+) of its axis: (.+)", lambda m: f"阶段 {m[1]}（所在轴的进程 {m[2]}）：{m[3]}"),
        (r"(\d+) servers?, table (\S+)", lambda m: f"{m[1]} 个参数服务器，表 {m[2]}"),
        (r"this process, table (\S+)", lambda m: f"本进程，表 {m[1]}"),
        (r"cut over (.+) by its layer", lambda m: f"由所在层沿 {m[1]} 切分"),
        (
            r"shard over \w+(?:, shard over \w+)*",
            lambda m: "，".join(f"沿 {x} 分片" for x in re.findall(r"over (\w+)", m[0])),
        ),
        (r"all-reduce \((\w+)\) in buckets of (\S+) MiB", lambda m: f"all-reduce（{m[1]}），每桶 {m[2]} MiB"),
        (r"push \((\w+)(?:, (\d+) steps)?\)", lambda m: f"推送（{m[1]}{f'，{m[2]} 步' if m[2] else ''}）"),
        (
            r"(.+): (.+) \(one rank: nothing to do\)",
            lambda m: f"{translate_words(f'{m[1]}: {m[2]}')}（单个进程，无事可做）",
        ),
        (
            r"(.+?): (.+) are sharded over ranks; (.+)",
            lambda m: f"{_setting(m[1])}：{_layers(m[2])}切分到各进程；{_EFFECTS.get(m[3], m[3])}",
        ),
        (r"planner: (.+): (predicted .+)", lambda m: f"规划器：{m[1]}：{_effect(m[2])}"),
        (r"(.+?): (.+)", lambda m: f"{_setting(m[1])}：{_effect(m[2])}" if _effect(m[2]) != m[2] else m[0]),
    )
)


def _setting(text: str) -> str:
    text = re.sub(r"^world size (\d+)$", r"\1 个进程", text)
    text = re.sub(r"^(\d+) servers?$", r"\1 个参数服务器", text)
    text = re.sub(r"^no a_sync$", "未设 a_sync", text)
    text = re.sub(r"^px\.shard over (.+)$", r"px.shard（\1）", text)
    return re.sub(r"^(\d+) parameters without requires_grad$", r"\1 个参数没有 requires_grad", text)


def _layers(text: str) -> str:
    """Return names of layers with their styles in Chinese; where only some are named, with the number of all."""
    text = re.sub(r"(^|, )the model \(", r"\1整个模型 (", text)
    if match := re.fullmatch(r"(.+) and (\d+) more", text):
        return f"{match[1]} 等 {match[1].count(', ') + 1 + int(match[2])} 层"
    return f"{text} "


def _effect(text: str) -> str:
    if text in _EFFECTS:
        return _EFFECTS[text]
    text = re.sub(r"^each rank computes (1/\d+) of every global batch$", r"每个进程计算每个全局批的 \1", text)
    text = re.sub(
        r"^each of (\d+) replicas computes (1/\d+) of every global batch, on whichever rank holds it$",
        r"\1 个副本各计算每个全局批的 \2，在哪个进程上都可以",
        text,
    )
    text = re.sub(
        r"^workers push to the servers in mode (\w+)(?: \((\d+) steps\))?$",
        lambda m: f"工作进程以 {m[1]} 模式推送到参数服务器{f'（{m[2]} 步）' if m[2] else ''}",
        text,
    )
    text = re.sub(
        r"^faster ranks get more of each global batch, about (.+)$",
        lambda m: "较快的进程分得更多样本，约为 " + re.sub(r": (\d+) each", r" 各 \1", m[1]).replace(", ", "，"),
        text,
    )
    return re.sub(
        r"^predicted (\S+) ms a step of (\d+) rows, (\S+) MiB a rank$",
        r"预计每步（\2 个样本）\1 ms，每个进程 \3 MiB",
        text,
    )


def translate_words(text: str) -> str:
    """Return words of a Plan's picture in Chinese; those of the model are returned as they are."""
    if text in _FIXED:
        return _FIXED[text]
    for pattern, chinese in _PHRASES:
        if match := pattern.fullmatch(text):
            return chinese(match)
    return text


def translate_picture(svg: str) -> str:
    """Return a Plan's picture with its words in Chinese, cut to the widths of those before."""
    return _TEXT.sub(lambda m: f"{m['tag']}{_translate_content(m['whole'], m['shown'])}</text>", svg)


_TEXT = re.compile(r"(?P<tag><text\b[^>]*>)(?:<title>(?P<whole>[^<]*)</title>)?(?P<shown>[^<]*)</text>")


def _translate_content(whole: str | None, shown: str) -> str:
    chinese = translate_words(unescape(shown if whole is None else whole))
    return fit(chinese, cell_len(chinese if whole is None else unescape(shown)))
