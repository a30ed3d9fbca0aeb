"""What the planner and its commands show: tables, pictures, reasons and answers, in English and in Chinese."""

from __future__ import annotations

PLANNER: dict[str, tuple[str, str]] = {
    "busy": (
        "Load {load} on {cores} cores: other work is running here, and what is measured now will look slow.",
        "{cores} 个核的负载为 {load}：本机正在运行其他工作，此时测得的速度会偏低。",
    ),
    "measuring": ("ranks: {ranks}, {part}", "进程数 {ranks}：{part}"),
    "measured kept": (
        "Saved to {path}; the cluster name `here` means this machine.",
        "已保存到 {path}；集群名 here 即指本机。",
    ),
    "measured column": ("ranks: {ranks}, threads each: {threads}", "进程 {ranks}，各 {threads} 线程"),
    "measured product": ("matrix product", "矩阵乘"),
    "measured stream": ("element-wise", "逐元素运算"),
    "measured launch": ("one operator, forward + backward", "单个算子，前向 + 反向"),
    "measured beside": ("seconds lost per second of overlap", "每重叠一秒多耗的秒数"),
    "timeline title": ("{name}: {step} a step", "{name}：每步 {step}"),
    "timeline facts": (
        "{rate}, idle {idle}; {schedule}, micro-batches: {microbatches}, ranks per row: {copies}",
        "{rate}，空闲 {idle}；{schedule}，微批数 {microbatches}，每行代表 {copies} 个进程",
    ),
    "timeline facts layers": ("{rate}; all {copies} ranks do the same", "{rate}；全部 {copies} 个进程相同"),
    "timeline each rank": ("each rank", "每个进程"),
    "timeline tokens a second": ("{rate} tokens/s", "{rate} tokens/s"),
    "timeline rows a second": ("{rate} samples/s", "{rate} 行/s"),
    "timeline price": ("; {usd} USD a step", "；每步 {usd} 美元"),
    "timeline paler": ("; later stages of a rank are paler", "；同一进程靠后的阶段颜色较浅"),
    "timeline left out": (
        "; {count} micro-batches of the steady state not drawn",
        "；稳态中有 {count} 个微批未画出",
    ),
    "timeline forward": ("forward", "前向"),
    "timeline backward": ("backward", "反向"),
    "timeline weights": ("gradients of weights", "权重梯度"),
    "timeline optimizer": ("optimizer", "优化器"),
    "timeline collectives": ("collectives", "集合通信"),
    "timeline send": ("send to a stage", "阶段间发送"),
    "timeline gradients": ("gradients reduced", "梯度归约"),
    "timeline idle": ("idle", "空闲"),
    "timeline stage": ("stage {stages}", "阶段 {stages}"),
    "timeline peak": ("peak memory", "内存峰值"),
    "plan head": (
        "{where}: {step} a step, at most {gap} % over the optimum; {memory} a rank; mostly {cause}",
        "{where}：每步 {step}，最多比最优慢 {gap} %；每个进程 {memory}；耗时最多的是{cause}",
    ),
    "plan alone": (
        "a single process is faster: {step} a step",
        "单个进程：每步 {step}，比这些进程一起更快",
    ),
    "plan fastest": ("Fastest Plan of each configuration", "各种排布中最快的方案"),
    "plan arrangement": ("configuration", "排布"),
    "plan step": ("a step", "每步"),
    "plan a rank": ("a rank", "每个进程"),
    "plan cut": ("sharded layers: {layers}", "切分的层：{layers}"),
    "plan searched": (
        "searched: {count} configurations, {listed} of them layer by layer; {space}",
        "搜索范围：{count} 种排布，其中 {listed} 种逐层求解；{space}",
    ),
    "plan not searched": ("not searched: {why}", "未搜索：{why}"),
    "left out described": (
        (
            "cp, ep and hsdp (1 in every choice); schedules other than the file's ({schedule}); tp above {cut}; "
            "vpp above {virtual}; dp and micro-batches that do not divide the batch; other orders of ranks"
        ),
        (
            "cp、ep 和 hsdp（每种选择中均为 1）；文件所写以外的调度（{schedule}）；大于 {cut} 的 tp；"
            "大于 {virtual} 的 vpp；不能整除批的 dp 和微批；其他进程顺序"
        ),
    ),
    "left out tokens": (
        "activations sharded over tokens, as the model's code fails on them",
        "层间按 token 切分，因为模型代码不能在部分 token 上运行",
    ),
    "left out cut loss": (
        "a loss over logits sharded by class (`vocab` of a head), as the loss function takes full logits",
        "在按类别切分的 logits 上计算损失（输出层的 `vocab`），因为损失函数需要完整的 logits",
    ),
    "left out staged parts": (
        "modules in parts together with stages, but for those that a limit asks for",
        "与流水线阶段一起使用的分部计算（parts），限制中要求的除外",
    ),
    "left out accumulation": (
        (
            "micro-batches without stages, which is gradient accumulation: take a smaller global batch, and "
            "strategy.gradient_merge adds up several"
        ),
        "没有流水线阶段的微批（即梯度累积）：请用较小的全局批，并用 strategy.gradient_merge 累积若干批",
    ),
    "left out zero bubble": (
        "zero bubble together with sharding, recomputation or parts, or with two stages of each rank in a V",
        "与 ZeRO 切分、重计算或 parts 一起使用的零气泡调度，以及每个进程两个阶段呈 V 形的零气泡调度",
    ),
    "left out compiled zero bubble": (
        "zero bubble, as the backward pass of a compiled stage is one piece",
        "零气泡调度，因为编译后的阶段的反向计算不可拆分",
    ),
    "left out frozen zero bubble": (
        "zero bubble, as the model begins with frozen layers",
        "零气泡调度，因为模型开头的层被冻结",
    ),
    "left out shared zero bubble": (
        "zero bubble, as parameter {name!r} is used more than once",
        "零气泡调度，因为参数 {name!r} 被多次使用",
    ),
    "left out pipelines": ("pipelines, as {why}", "流水线，因为{why}"),
    "left out sharding": (
        "sharding, as parameter {name!r} has no dim to cut: give it shape (1,)",
        "ZeRO 切分，因为参数 {name!r} 没有可切的维：请把它的形状改为 (1,)",
    ),
    "left out sharded stages": (
        "sharding of stages, as parameter {name!r} is in no unit alone",
        "流水线阶段内的 ZeRO 切分，因为参数 {name!r} 不只属于一个单元",
    ),
    "space data": ("data", "数据副本 data"),
    "space model": ("model", "层切分 model"),
    "space stages": ("stages", "阶段 stages"),
    "space virtual": ("virtual", "虚拟阶段 virtual"),
    "space micro_batches": ("micro_batches (how many, of stages)", "微批 micro（个数，随流水线阶段）"),
    "space schedule": ("schedule", "调度 schedule"),
    "space zero": ("zero", "ZeRO"),
    "space recompute": ("recompute", "重计算 recompute"),
    "space outermost": ("outermost", "最外层"),
    "space layers": ("layers", "层"),
    "list between": (", ", "，"),
    "space between": ("; ", "；"),
    "space decisions": ("{count} decisions", "{count} 个选择"),
    "explain title": ("{layer} under {arrangement}", "{layer}，排布 {arrangement}"),
    "explain way": ("strategy", "策略"),
    "explain forward": ("forward ms", "前向 ms"),
    "explain backward": ("backward ms", "反向 ms"),
    "explain sent": ("of these comm ms", "其中通信 ms"),
    "explain exchange": ("grad sync ms", "梯度同步 ms"),
    "explain update": ("update ms", "更新 ms"),
    "plan picture": ("{path}: the model with its placements", "{path}：模型及其切分方式"),
    "plan stages train": (
        "stages train through px.Model or px.train_step; for a loop that calls loss.backward() add the limit pp=1",
        "流水线阶段用 px.Model 或 px.train_step 训练；若循环自己调用 loss.backward()，请加限制 pp=1",
    ),
    "plan saved": (
        "{path}: train with it, px.distribute(..., plan=phalanx.plan.load_plan('{path}'))",
        "{path}：用它训练，px.distribute(..., plan=phalanx.plan.load_plan('{path}'))",
    ),
    "plan compute": ("compute", "计算"),
    "plan collectives of layers": ("collectives of layers", "层内集合通信"),
    "plan sharding": ("sharding", "ZeRO 切分"),
    "plan exchange of gradients": ("gradient synchronisation", "梯度同步"),
    "plan optimizer": ("optimizer", "优化器"),
    "plan stages": ("waits of stages", "流水线等待"),
    "timeline written": (
        "{path}: {step} a step (predicted {predicted}), idle {idle}, peak rank {memory}, {rate}{price}",
        "{path}：每步 {step}（公式预测 {predicted}），空闲 {idle}，内存最多的进程 {memory}，{rate}{price}",
    ),
    "plan captured": (
        "captured at level {level} only: {why}",
        "仅以 {level} 级别读取，未得到全部算子：{why}",
    ),
    "settings aside": (
        "ignored settings of the script's strategy, which the planner decides: {names}",
        "已忽略脚本策略中由规划器决定的设置：{names}",
    ),
    "planning": (
        "planning {model} for a global batch of {rows} samples; --time-limit stops the search at the best Plan so far",
        "正在为 {model} 制定方案，全局批为 {rows} 行；--time-limit 到时返回当前最优",
    ),
    "planning adam": (
        "the script passes no optimizer, so the plan is for adam; choose another with --optimizer",
        "脚本没有交出优化器，方案按 adam 制定；可用 --optimizer 另行指定",
    ),
    "and more": ("{names} and {count} more", "{names} 等，另有 {count} 个"),
    "why not": (
        "With {limits} the best is {config}: {step} a step, {change}, {memory}; most of it {cause} ({more}).",
        "限制 {limits} 时最优为 {config}：每步 {step}，{change}，{memory}；差别最大的是{cause}（{more}）。",
    ),
    "why not cut": ("{config}, sharded layers: {layers}", "{config}，切分的层：{layers}"),
    "plan parameters, gradients and optimizer state": (
        "parameters, gradients and optimizer state",
        "参数、梯度与优化器状态",
    ),
    "plan activations": ("activations", "激活"),
    "plan what one layer needs": ("what one layer needs while it runs", "单层运行时的需要"),
    "spent compute": ("compute", "计算"),
    "spent exposed_communication": ("exposed communication", "未被掩盖的通信"),
    "spent pipeline_send": ("pipeline send", "流水线发送"),
    "spent pipeline_bubble": ("pipeline bubble", "流水线气泡"),
    "spent gradients": ("gradients", "梯度交换"),
    "spent optimizer": ("optimizer", "优化器"),
    "held parameters": ("parameters", "参数"),
    "held gradients": ("gradients", "梯度"),
    "held optimizer": ("optimizer", "优化器状态"),
    "held activations": ("activations", "激活"),
    "held logits": ("logits", "logits"),
    "held gathered": ("gathered parameters", "聚合的参数"),
    "held workspace": ("workspace", "工作区"),
    "predicted run": ("run", "任务"),
    "predicted on": ("on", "设备"),
    "predicted step": ("step s", "每步 s"),
    "predicted mostly": ("mostly", "主要耗时"),
    "predicted off": ("off by", "偏差"),
    "predicted caption": (
        "tokens/s, TFLOP/s and GiB are those of one device",
        "tokens/s、TFLOP/s 和 GiB 均为单个设备的值",
    ),
    "predicted too large": ("; ! does not fit", "；! 表示放不下"),
    "choices proved": (
        (
            "{choices} choices, {priced} priced by a formula: none is faster than {bound} s by it, and the fastest "
            "found is within {gap} % of the best by it. The {simulated} fastest by it were simulated event by event, "
            "and the choices are in the order of that time (step s). docs/predict.md says how good both are."
        ),
        (
            "{choices} 种选择，用公式计算了 {priced} 种：按公式没有快于 {bound} s 的，找到的最快者与公式的最优"
            "相差不超过 {gap} %。公式最快的 {simulated} 种经逐事件模拟，并按模拟时间（每步 s）排列。"
            "二者的精度见 docs/predict.md。"
        ),
    ),
    "choices formula": ("formula s", "公式 s"),
    "plan price": ("{usd} USD a step", "每步 {usd} 美元"),
    "choices price": ("The first costs {usd} USD a step.", "第一种每步 {usd} 美元。"),
    "choices micro": ("micro (sequences of a micro-batch)", "micro（每个微批的序列数）"),
    "choices searched": ("searched: {space}", "搜索范围：{space}"),
    "why not same": (
        "The answer keeps to {limits} already: {config}, {step} a step.",
        "结果本已满足 {limits}：{config}，每步 {step}。",
    ),
    "why not impossible": ("With {limits}: {why}", "限制 {limits} 时：{why}"),
    "none cut": ("none", "无"),
}
"""English and Chinese by key; fields in braces."""
