"""What the planner, captures and files of Plans refuse, in English and in Chinese."""

from __future__ import annotations

PLANNER_ERRORS: dict[str, tuple[str, str]] = {
    "script ended": (
        "{script} ended ({code}) before it trained a model. {advice}",
        "{script} 在训练模型之前已结束（{code}）。{advice}",
    ),
    "script trained nothing": (
        "{script} finished without training a distributed model. {advice}",
        "{script} 运行到结尾，没有训练任何分布的模型。{advice}",
    ),
    "script inputs": (
        (
            "{model} is called with keyword arguments beside {name}, which takes inputs by position alone. To plan it, "
            "call it with one kind of them, or give its forward named parameters."
        ),
        (
            "{model} 的调用既有关键字参数，又有只能按位置传入的 {name}。要为它制定方案，请只用其中一种方式调用，"
            "或为 forward 的参数命名。"
        ),
    ),
    "script to plan": (
        (
            "Give a script that calls px.distribute(model, optimizer, data), fleet.distributed_model(model) or "
            "px.Model(...).train(...)."
        ),
        (
            "请给出调用 px.distribute(model, optimizer, data)、fleet.distributed_model(model) 或 "
            "px.Model(...).train(...) 的脚本。"
        ),
    ),
    "script failed": (
        "{script} failed before it trained a model. Make `python {script}` work first:",
        "{script} 在训练模型之前出错。请先让 `python {script}` 可以运行：",
    ),
    "script only": (
        "Arguments, --optimizer, --save and --picture are for a script, FILE.py.",
        "脚本参数、--optimizer、--save 和 --picture 只用于脚本 FILE.py。",
    ),
    "no folder": (
        "Asked to write {path}, and there is no folder {folder}. Make it, or name another.",
        "要写入 {path}，但没有目录 {folder}。请创建该目录或换一个。",
    ),
    "cannot write": (
        "{path}: cannot be written ({why}). Give a file in a folder that exists and is yours.",
        "{path}：无法写入（{why}）。请给出位于已存在且有权限的目录中的文件。",
    ),
    "limit": (
        ("Invalid limit {said!r}. Write a knob ({knobs}), one of <=, >= and =, and a value, such as tp<=8.{nearest}"),
        "限制 {said!r} 无法识别。请写旋钮（{knobs}）、<=、>= 或 = 之一，再写值，如 tp<=8。{nearest}",
    ),
    "limit of a layer": (
        (
            "Invalid limit {said!r}. Write a knob ({knobs}) and a value, such as tp<=2, or a layer and one of "
            "{styles}, such as classifier.*=whole.{nearest}"
        ),
        (
            "限制 {said!r} 无法识别。请写旋钮（{knobs}）和值，如 tp<=2；"
            "或写层和 {styles} 之一，如 classifier.*=whole。{nearest}"
        ),
    ),
    "limit of no layer": (
        "Invalid limit {said!r}: the model calls no layer {layer!r}.{nearest} It calls {known}.",
        "限制 {said!r} 中的层 {layer!r} 未被此模型调用。{nearest}被调用的有 {known}。",
    ),
    "limit of another kind": (
        "Invalid limit {said!r}: {layer!r} is a {kind}, and {style!r} is a style of {able}. Use another.{why}",
        "限制 {said!r} 无效：{layer!r} 属于 {kind}，而 {style!r} 只适用于 {able}。请选其他方式。{why}",
    ),
    "limit of a head": (
        (
            " The loss is planned on whole logits. To cut head and loss, px.shard(model, {{{layer!r}: 'vocab'}}) with "
            "px.vocab_cross_entropy or px.SoftmaxCrossEntropyExpand."
        ),
        (
            "规划器按完整的 logits 计算损失。若要同时切分输出层和损失，请用 px.shard(model, {{{layer!r}: 'vocab'}}) 和 "
            "px.vocab_cross_entropy 或 px.SoftmaxCrossEntropyExpand。"
        ),
    ),
    "limit one of": (
        "Invalid limit {said!r}. Write {knob}= and one of {known}.",
        "限制 {said!r} 无效。请写 {knob}= 和 {known} 之一。",
    ),
    "limit number": (
        "Invalid limit {said!r}: the value is not an integer. Write one, such as {knob}<=8.",
        "限制 {said!r} 的值不是整数。请写整数，如 {knob}<=8。",
    ),
    "limit many": (
        "limits takes a list, got {said!r}. Write limits=[{said!r}].",
        "limits 应为列表，实际为 {said!r}。请写 limits=[{said!r}]。",
    ),
    "not above zero": (
        "auto_parallel was asked for {name}={value}. Give a number above 0.",
        "auto_parallel 的 {name}={value} 无效。请给出大于 0 的数。",
    ),
    "no bytes": (
        "auto_parallel was asked for {name}={value!r}. Give bytes, or an amount such as '8GiB', '500MiB' or '8GB'.",
        "auto_parallel 的 {name}={value!r} 无效。请给出字节数，或 '8GiB'、'500MiB'、'8GB' 这样的量。",
    ),
    "no seconds": (
        "auto_parallel was asked for {name}={value!r}. Give seconds, 0 or more, or None for a complete search.",
        "auto_parallel 的 {name}={value!r} 无效。请给出不小于 0 的秒数，或 None 表示完整搜索。",
    ),
    "not a module": (
        "auto_parallel takes a torch.nn.Module, got {found}. Pass the model itself.",
        "auto_parallel 为 torch.nn.Module 制定方案，实际为 {found}。请传入模型本身。",
    ),
    "unknown optimizer": (
        "Asked for the optimizer {said!r}. Give {known}, or a torch optimizer.",
        "优化器 {said!r} 未知。请给出 {known} 之一，或 torch 优化器。",
    ),
    "sparse gradients": (
        (
            "auto_parallel was asked for a Plan of a model whose module {name!r} makes sparse gradients, which ranks "
            "cannot add up. Build it with sparse=False."
        ),
        "模块 {name!r} 产生稀疏梯度，进程间无法相加，auto_parallel 不能为其制定方案。请用 sparse=False 构造它。",
    ),
    "no arrangement": (
        "No parallel configuration{asked}{found}. Relax a limit, or use another number of ranks.",
        "没有可用的进程排布{asked}{found}。请放宽限制，或换一个进程数。",
    ),
    "keeps to limits": (" keeps to the limits {limits}", "满足限制 {limits}"),
    "computes the model": (" computes this model", "可以计算此模型"),
    "left out of limits": (" (not searched: {why})", "（未搜索：{why}）"),
    "layers left": (
        ": {count} are left, and in each a layer has no strategy",
        "：剩下 {count} 种，每种都有某层无法计算",
    ),
    "nothing fits": (
        (
            "No Plan fits: every one needs {least} a rank or more ({where}: {bytes} bytes), most of it {part}, and "
            "there are {room}. Take more ranks, ranks with more memory, or a smaller batch."
        ),
        (
            "没有放得下的方案：每个方案每进程至少需要 {least}（{where}：{bytes} 字节），其中最多的是{part}，"
            "而可用 {room}。请用更多进程、更大内存的设备或更小的批。"
        ),
    ),
    "nothing fits in time": (
        (
            "No Plan fits: every one needs at least {bound} a rank{found}, and there are {room}. Take more ranks, "
            "ranks with more memory, or a smaller batch."
        ),
        (
            "没有放得下的方案：每个方案每进程至少需要 {bound}{found}，而可用 {room}。"
            "请用更多进程、更大内存的设备或更小的批。"
        ),
    ),
    "enough was found": (
        "; {least} is enough ({where}: {bytes} bytes, most of it {part}), and less may be",
        "（{least} 足够，更少也许可行；{where}：{bytes} 字节，其中最多的是{part}）",
    ),
    "no choice fits": (
        (
            "No choice fits: the least that any needs is {least} GiB a device ({choice}), of which {part} {most} GiB, "
            "and {device} has {room} GiB to use. Take more devices, devices with more memory, a shorter sequence or a "
            "smaller batch."
        ),
        (
            "没有放得下的选择：每设备至少需要 {least} GiB（{choice}），其中 {part} 占 {most} GiB，而 {device} 可用 "
            "{room} GiB。请用更多设备、更大内存的设备、更短的序列或更小的批。"
        ),
    ),
    "strategy decides": (
        ("strategy.{name} sets what the planner is to decide. Remove it, or pass it as a limit, such as tp=2."),
        "strategy.{name} 规定了如何切分模型，而这正是规划器要找的。请去掉它，或写成限制，如 tp=2。",
    ),
    "plan without price": (
        "This Plan cannot be simulated: the cost model has no price for {what}. Leave it out of the Plan.",
        "无法模拟此方案：代价模型无法计算 {what}。请从方案中去掉它。",
    ),
    "plan of other ranks": (
        "The Plan is for {ranks} ranks, and the cluster {cluster} has {devices} devices. Name another cluster.",
        "此方案用于 {ranks} 个进程，而集群 {cluster} 有 {devices} 个设备。请换一个集群。",
    ),
    "strategy against plan": (
        (
            "strategy.{first} and {second}, of the Plan {config}, exclude each other: {why}. Turn the setting off, or "
            "limit the search."
        ),
        "strategy.{first} 与方案 {config} 中的 {second} 互斥：{why}。请关闭该设置，或限制搜索。",
    ),
    "plan of unknown step": (
        (
            "This Plan places single operators, and the step that it is of could not be captured from the data: {why} "
            "Or call phalanx.auto.capture.step.capture(model, sample) with what a global batch calls the model with "
            "before, on rank 0 at least."
        ),
        (
            "此方案切分单个算子，而无法从数据中得到它所对应的训练步：{why} 也可以先调用 "
            "phalanx.auto.capture.step.capture(model, sample)，sample 为一个全局批中模型的输入，至少在 rank 0 上。"
        ),
    ),
    "plan with servers": (
        (
            "AUTO_PARALLEL plans for workers that hold all parameters, and this job has servers. Launch it without, or "
            "write DATA_PARALLEL."
        ),
        "AUTO_PARALLEL 面向持有全部参数的工作进程，而本任务有参数服务器。请不带服务器启动，或改用 DATA_PARALLEL。",
    ),
    "plan with tables": (
        (
            "The planner was asked for a Plan of a model whose parameter {name!r} stands for a table of rows, which "
            "live on parameter servers. It plans models that hold all their parameters. Train this one as its strategy "
            "says, `phalanx run --server_num 1 --worker_num 2 train.py`, or build it with torch.nn.Embedding."
        ),
        (
            "规划器面向持有全部参数的模型，而此模型的参数 {name!r} 是参数服务器上的表。请按其策略训练，"
            "`phalanx run --server_num 1 --worker_num 2 train.py`，或用 torch.nn.Embedding 构造模型。"
        ),
    ),
    "explain unknown": (
        "explain was asked for {layer!r}, which this model does not call.{nearest} It calls {known}.",
        "explain 查询的 {layer!r} 未被此模型调用。{nearest}被调用的有 {known}。",
    ),
    "no choice": (
        (
            "No parallel configuration on {devices} devices satisfies the limits ({limits}). Relax one, or use another "
            "number of devices."
        ),
        "{devices} 个设备没有满足限制（{limits}）的切分方式。请放宽限制，或换一个设备数。",
    ),
    "why not nothing": (
        "why_not needs a limit, such as tp=1 or classifier.4=column.",
        "why_not 未给出限制。请给出，如 tp=1 或 classifier.4=column。",
    ),
    "capture level": (
        "capture knows the levels {known}, not {level!r}.{nearest}",
        "capture 的级别有 {known}，没有 {level!r}。{nearest}",
    ),
    "capture allows": (
        "capture was asked for level {level!r}, the model allows {best!r}: {why}",
        "capture 要求级别 {level!r}，而此模型只允许 {best!r}：{why}",
    ),
    "capture sample": (
        (
            "capture with a loss takes a sample (input, ..., target), found a {found}. Put the target last, or leave "
            "loss_fn out."
        ),
        "带损失函数的 capture 需要样本 (input, ..., target)，实际为 {found}。请把目标放在最后，或去掉 loss_fn。",
    ),
    "capture failed": (
        (
            "capture runs {model} on tensors with the shapes of the sample, and it failed: {why}; on dummies: "
            "{dummies}. {advice}"
        ),
        "capture 用与样本同形状的张量运行 {model}，但失败：{why}；用占位值运行：{dummies}。{advice}",
    ),
    "capture devices": (
        "The model is on {model}, the sample on {sample}: put them on one device.",
        "模型在 {model} 上，样本在 {sample} 上：请放到同一设备。",
    ),
    "capture asks": (
        "{operator} in {module} asks for values, which are known only when it runs",
        "{module} 中的 {operator} 要读取数值，而数值只有运行时才知道",
    ),
    "capture no blocks": ("no block is repeated", "没有重复的块"),
    "capture endless": (
        "{module} asks {operator} for values without end",
        "{module} 不停地用 {operator} 读取数值",
    ),
    "the whole model": ("the model", "模型"),
    "stages of nothing": ("the model holds no modules with parameters", "模型没有带参数的模块"),
    "stages out of order": (
        "the forward pass does not call the model's units in the order in which they were made",
        "前向计算没有按创建顺序调用模型的各单元",
    ),
    "stages of any inputs": (
        (
            "the forward pass of {model} cannot be cut into stages, because it takes any number of inputs ({names}). "
            "Name each of them in its signature."
        ),
        "{model} 的前向计算无法划分为阶段，因为它接受任意数量的输入（{names}）。请在其签名中逐一列出输入。",
    ),
    "stages of one piece": (
        "all of it belongs together: it is one unit, or its units share parameters or take turns",
        "模型不可再分：它只有一个单元，或其各单元共享参数、交替运行",
    ),
    "stages look at values": (
        (
            "the forward pass of {model} cannot be cut into stages, because it looks at values while it runs: {why}. "
            "Move such code into one of its units ({units}), or write the model as a torch.nn.Sequential of them."
        ),
        (
            "{model} 的前向计算无法划分为阶段，因为它在运行时读取数值：{why}。请把这样的代码移入某个单元（{units}），"
            "或把模型写成由这些单元组成的 torch.nn.Sequential。"
        ),
    ),
    "stages taken back": (
        (
            "the forward pass uses {name!r} of stage {stage} while it is in stage {now} (after {unit!r}): it does not "
            "run through the units in their order. Let pipeline_configs cuts keep in one stage what is used together, "
            "or register the modules in the order in which they run."
        ),
        (
            "前向计算在阶段 {now}（{unit!r} 之后）使用了阶段 {stage} 的 {name!r}：没有按顺序经过各单元。"
            "请用 pipeline_configs 的 cuts 把一起使用的放在同一阶段，或按运行顺序注册模块。"
        ),
    ),
    "capture advice": ("Pass what one training step takes.", "请传入一个训练步所用的数据。"),
    "no Plan file": (
        "no Plan at {path}. Write one with phalanx.plan.save_plan(plan, path).",
        "{path} 处没有方案文件。请用 phalanx.plan.save_plan(plan, path) 写入。",
    ),
    "Plan unreadable": (
        "the Plan in {path} cannot be read: {why}. Name a file.",
        "{path} 中的方案无法读取：{why}。请给出文件。",
    ),
    "Plan broken": ("{path} does not hold a Plan: {why}", "{path} 中不是方案：{why}"),
    "Plan without version": (
        'it has no version. Write "version": 1, as save_plan does',
        '缺少版本。请像 save_plan 那样写 "version": 1',
    ),
    "rule of no module": (
        (
            "the Plan has a rule modules[{rule}], which matches no module of this model. Nearest in spelling: "
            "{nearest}. Correct the rule, or leave it out."
        ),
        "方案中的规则 modules[{rule}] 不匹配此模型的任何模块。拼写最接近的有：{nearest}。请改正或删除该规则。",
    ),
    "rule of no parameter": (
        (
            "the Plan has a rule params[{rule}], which matches no parameter of this model. Nearest in spelling: "
            "{nearest}. Correct the rule, or leave it out."
        ),
        "方案中的规则 params[{rule}] 不匹配此模型的任何参数。拼写最接近的有：{nearest}。请改正或删除该规则。",
    ),
    "rule of another name": (
        (
            "the Plan has a rule params[{rule}], which does nothing: what it matches is shared, and a shared parameter "
            "goes by its first name, {first}. Say that, or leave the rule out."
        ),
        (
            "方案中的规则 params[{rule}] 不起作用：它匹配的参数是共享的，而共享参数以其第一个名称 {first} 为准。"
            "请改用该名称或删除该规则。"
        ),
    ),
    "Plan field": ("{path}: there is no such field.{nearest}", "{path}：没有此字段。{nearest}"),
    "Plan value": ("{path}: {why}", "{path}：{why}"),
}
"""English and Chinese by key; fields in braces."""
