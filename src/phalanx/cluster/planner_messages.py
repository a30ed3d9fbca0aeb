"""What the planner, its commands and descriptions of clusters and runs say, in English and in Chinese."""

from __future__ import annotations

PLANNER: dict[str, tuple[str, str]] = {
    "busy": (
        "Load {load} on {cores} cores: other work is running here, and what is measured now will look slow.",
        "{cores} 个核的负载为 {load}：本机正在运行其他工作，此时测得的速度会偏低。",
    ),
    "measuring": ("ranks: {ranks}, {part}", "进程数 {ranks}：{part}"),
    "measured kept": (
        "Kept in {path}; the cluster word `here` means this machine.",
        "已保存到 {path}；集群名 here 即指本机。",
    ),
    "measured column": ("ranks: {ranks}, threads each: {threads}", "进程 {ranks}，各 {threads} 线程"),
    "measured product": ("matrix product", "矩阵乘"),
    "measured stream": ("element-wise", "逐元素运算"),
    "measured launch": ("one operator, forward + backward", "单个算子，前向 + 反向"),
    "measured beside": ("seconds lost per second of overlap", "每重叠一秒多耗的秒数"),
    "timeline title": ("{name}: {step} a step", "{name}：每步 {step}"),
    "timeline facts": (
        "{rate}, idle {idle}; {schedule}, micro-batches: {microbatches}, ranks a row: {copies}",
        "{rate}，空闲 {idle}；{schedule}，微批数 {microbatches}，每行代表 {copies} 个进程",
    ),
    "timeline facts layers": ("{rate}; all {copies} ranks do the same", "{rate}；全部 {copies} 个进程相同"),
    "timeline each rank": ("each rank", "每个进程"),
    "timeline tokens a second": ("{rate} tokens/s", "{rate} tokens/s"),
    "timeline rows a second": ("{rate} rows/s", "{rate} 行/s"),
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
        "{where}: {step} a step, at most {gap} % over the best; {memory} a rank; mostly {cause}",
        "{where}：每步 {step}，最多比最优慢 {gap} %；每个进程 {memory}；耗时最多的是{cause}",
    ),
    "plan fastest": ("Fastest of each arrangement", "各种排布中最快的方案"),
    "plan arrangement": ("arrangement", "排布"),
    "plan step": ("a step", "每步"),
    "plan a rank": ("a rank", "每个进程"),
    "plan cut": ("layers cut: {layers}", "切分的层：{layers}"),
    "plan searched": (
        "searched: {count} arrangements, {listed} of them layer by layer; {space}",
        "搜索范围：{count} 种排布，其中 {listed} 种逐层求解；{space}",
    ),
    "plan not searched": ("not searched: {why}", "未搜索：{why}"),
    "plan picture": ("{path}: the model with its placements", "{path}：模型及其切分方式"),
    "plan saved": (
        "{path}: train with it, px.distribute(..., plan=phalanx.plan.load_plan('{path}'))",
        "{path}：用它训练，px.distribute(..., plan=phalanx.plan.load_plan('{path}'))",
    ),
    "plan compute": ("compute", "计算"),
    "plan collectives of layers": ("collectives of layers", "层内集合通信"),
    "plan exchange of gradients": ("exchange of gradients", "梯度交换"),
    "plan optimizer": ("optimizer", "优化器"),
    "plan stages": ("waits of stages", "流水线等待"),
    "timeline written": (
        "{path}: {step} a step (predicted {predicted}), idle {idle}, fullest rank {memory}, {rate}{price}",
        "{path}：每步 {step}（公式预测 {predicted}），空闲 {idle}，内存最多的进程 {memory}，{rate}{price}",
    ),
    "plan captured": (
        "read as {level}, without every operator: {why}",
        "仅以 {level} 级别读取，未得到全部算子：{why}",
    ),
    "planning": (
        "planning {model}; --time-limit ends the search with the best so far",
        "正在为 {model} 制定方案；--time-limit 到时返回当前最优",
    ),
    "script ended": (
        "{script} ended ({code}) before it trained a model. {advice}",
        "{script} 在训练模型之前已结束（{code}）。{advice}",
    ),
    "script trained nothing": (
        "{script} ran to its end and distributed no model with data. {advice}",
        "{script} 运行到结尾，没有把模型和数据一起分布。{advice}",
    ),
    "script to plan": (
        "Give a script that calls px.distribute(model, optimizer, data) or px.Model(...).train(...).",
        "请给出调用 px.distribute(model, optimizer, data) 或 px.Model(...).train(...) 的脚本。",
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
    "not text": (
        "{path} is no text in UTF-8. Give a file of JSON.",
        "{path} 不是 UTF-8 文本。请给出 JSON 文件。",
    ),
    "no run": (
        "{path} has no run. Write each as a JSON object; docs/predict.md has the format.",
        "{path} 中没有任务描述。请把每个任务写成一个 JSON 对象；格式见 docs/predict.md。",
    ),
    "one run": (
        "{options} one run, {path} has {count}. Give one of them.",
        "{options} 只接受一个任务描述，{path} 中有 {count} 个。请只给出其中一个。",
    ),
    "show": ("--trace and --timeline show", "--trace 和 --timeline"),
    "plan takes": ("phalanx plan takes", "phalanx plan"),
    "not JSON": (
        "{place}: not JSON ({why} in line {line}, column {column}). Write each run as a JSON object.",
        "{place}：不是 JSON（{why}，第 {line} 行第 {column} 列）。请把每个任务写成一个 JSON 对象。",
    ),
    "line of": ("{path}, line {number}", "{path} 第 {number} 行"),
    "not an object": (
        "{place}: a run is a JSON object, found {found}. Write {{...}}.",
        "{place}：任务描述应为 JSON 对象，实际为 {found}。请写成 {{...}}。",
    ),
    "unknown key": (
        "{place}: {path} is not known.{nearest} Known: {known}.",
        "{place}：没有 {path} 这一项。{nearest}可用：{known}。",
    ),
    "wrong value": ("{place}: {path}: {why}.", "{place}：{path}：{why}。"),
    "wrong values": ("{place}: {why}.", "{place}：{why}。"),
    "wrong and found": ("{why}, found {found}", "{why}，实际为 {found}"),
    "the whole": ("the whole", "整个文件"),
    "wrong extra_forbidden": ("There is no such key", "没有此项"),
    "wrong missing": ("Field required", "缺少此项"),
    "wrong int_type": ("Input should be a valid integer", "应为整数"),
    "wrong int_parsing": ("Input should be a valid integer", "应为整数"),
    "wrong int_from_float": ("Input should be a valid integer", "应为整数"),
    "wrong float_type": ("Input should be a valid number", "应为数字"),
    "wrong float_parsing": ("Input should be a valid number", "应为数字"),
    "wrong finite_number": ("Input should be a finite number", "应为有限的数"),
    "wrong string_type": ("Input should be a valid string", "应为字符串"),
    "wrong bool_type": ("Input should be a valid boolean", "应为 true 或 false"),
    "wrong bool_parsing": ("Input should be a valid boolean", "应为 true 或 false"),
    "wrong list_type": ("Input should be a valid list", "应为列表"),
    "wrong tuple_type": ("Input should be a valid list", "应为列表"),
    "wrong dict_type": ("Input should be an object, {{...}}", "应为对象 {{...}}"),
    "wrong model_type": ("Input should be an object, {{...}}", "应为对象 {{...}}"),
    "wrong greater_than": ("Input should be greater than {gt:g}", "应大于 {gt:g}"),
    "wrong greater_than_equal": ("Input should be greater than or equal to {ge:g}", "应不小于 {ge:g}"),
    "wrong less_than": ("Input should be less than {lt:g}", "应小于 {lt:g}"),
    "wrong less_than_equal": ("Input should be less than or equal to {le:g}", "应不大于 {le:g}"),
    "wrong literal_error": ("Input should be {expected}", "应为 {expected}"),
    "wrong too_short": ("Input should have at least {min_length} item(s)", "至少应有 {min_length} 项"),
    "run heads": (
        "heads ({heads}) must be a multiple of kv_heads ({groups})",
        "heads（{heads}）应为 kv_heads（{groups}）的整数倍",
    ),
    "run experts": (
        "experts ({experts}) and top_k ({chosen}) belong together, top_k the smaller",
        "experts（{experts}）与 top_k（{chosen}）应同时给出，且 top_k 较小",
    ),
    "run ranks": (
        "tp x pp x dp x cp is {ranks}, and the cluster has {devices} devices",
        "tp x pp x dp x cp 为 {ranks}，而集群有 {devices} 个设备",
    ),
    "run batch": (
        "batch.global ({rows}) is less than dp ({copies})",
        "batch.global（{rows}）小于 dp（{copies}）",
    ),
    "run stages": (
        "{layers} layers do not make {stages} x {virtual} stages",
        "{layers} 层不足以划分为 {stages} x {virtual} 个阶段",
    ),
    "run hsdp": ("hsdp ({copies}) must divide dp ({data})", "hsdp（{copies}）应整除 dp（{data}）"),
    "no cluster": (
        "A search needs a cluster, found none. Give --cluster, such as h100x8,nodes=16.",
        "搜索需要集群描述，未给出。请用 --cluster 给出，如 h100x8,nodes=16。",
    ),
    "cluster words": (
        (
            "Asked for the cluster {said!r}. Write DEVICExCOUNT,nodes=N, such as h100x8,nodes=16; cpux2 or here for "
            "this host; or the path of a .toml or .json file."
        ),
        (
            "集群 {said!r} 无法识别。请写“设备x个数,nodes=N”，如 h100x8,nodes=16；本机写 cpux2 或 here；"
            "或给出 .toml、.json 文件的路径。"
        ),
    ),
    "cluster setting": (
        "Asked for {word!r} of a cluster; {known} are known.{nearest}",
        "集群没有 {word!r} 这一项；可用：{known}。{nearest}",
    ),
    "cluster number": (
        "Asked for {name}={value} of a cluster. Give a number above 0.",
        "集群的 {name}={value} 无效。请给出大于 0 的数。",
    ),
    "cluster nodes": ("Asked for nodes={nodes}. Give a whole number.", "nodes={nodes} 无效。请给出整数。"),
    "cluster precision": (
        "{devices} compute in no precision in common. Describe equal nodes.",
        "{devices} 没有共同的计算精度。请描述相同的节点。",
    ),
    "cluster unreadable": (
        "{path}: cannot be read ({why}). Check the path of the cluster's file.",
        "{path}：无法读取（{why}）。请检查集群文件的路径。",
    ),
    "no text": ("it is no text", "不是文本"),
    "cluster broken": ("{path}: {why}. Correct the file.", "{path}：{why}。请改正该文件。"),
    "cluster file": (
        "{place}: {path}: {why}. docs/calibrate.md shows such a file.",
        "{place}：{path}：{why}。这种文件的写法见 docs/calibrate.md。",
    ),
    "cluster says": (
        "Asked for device={device} of {path}, which says itself what it is made of. Leave it out.",
        "为 {path} 指定了 device={device}，而该文件自己写明了设备。请去掉 device=。",
    ),
    "cluster strided": (
        (
            "{place}: asked for strided_gbps = {strided} over gbps = {gbps}, which is all the ports of a node carry. "
            "Correct one of them."
        ),
        "{place}：strided_gbps = {strided} 超过 gbps = {gbps}，后者是节点全部端口的带宽。请改正其中之一。",
    ),
    "cluster preset": (
        "The cluster's file describes {name}, which is a preset. Give it another name.",
        "集群文件描述的 {name} 是内置设备。请换一个名称。",
    ),
    "cards differ": (
        (
            "Asked to detect this host, found different cards: {names}. Choose equal ones with CUDA_VISIBLE_DEVICES, "
            "or describe the cluster in a file (docs/calibrate.md)."
        ),
        (
            "检测本机时发现不同的卡：{names}。请用 CUDA_VISIBLE_DEVICES 选择相同的卡，"
            "或用文件描述集群（docs/calibrate.md）。"
        ),
    ),
    "card unknown": (
        (
            "Asked to detect this host, found {card}, which has no preset. Known: {known}. Describe it in a file, "
            "under devices (docs/calibrate.md)."
        ),
        "检测本机时发现 {card}，没有其内置参数。已有：{known}。请在文件的 devices 下描述它（docs/calibrate.md）。",
    ),
    "device not known": ("which is not known", "未知"),
    "device could be": ("which could be {names}", "可能指 {names}"),
    "device": (
        "Asked for the device {name!r}, {why}.{nearest} Known: {known}.",
        "设备 {name!r}：{why}。{nearest}可用：{known}。",
    ),
    "device precision": (
        "Asked for {precision} on {device}, which computes in {known}. Choose one of them.",
        "{device} 不支持 {precision}，支持 {known}。请选择其中之一。",
    ),
    "measured not": (
        (
            "Asked for {name!r}, which was not measured. There are {known}. Run `phalanx calibrate -n N` with the "
            "number of ranks you plan for."
        ),
        "{name!r} 未测量。已有 {known}。请按计划的进程数运行 `phalanx calibrate -n N`。",
    ),
    "measured ranks": (
        (
            "Asked for {ranks} ranks of {host}, which was measured with {known}. Run `phalanx calibrate -n {ranks}` "
            "there."
        ),
        "要求 {host} 的 {ranks} 个进程，而该机器按 {known} 个进程测量过。请在其上运行 `phalanx calibrate -n {ranks}`。",
    ),
    "measured missing": (
        "{path} is not there. Measure this machine with `phalanx calibrate`.",
        "没有 {path}。请用 `phalanx calibrate` 测量本机。",
    ),
    "measured unreadable": (
        "{path} cannot be read ({why}). Measure again with `phalanx calibrate`.",
        "{path} 无法读取（{why}）。请用 `phalanx calibrate` 重新测量。",
    ),
    "measured version": (
        "{path}: asked for version {version}, found {found!r}. Measure again with `phalanx calibrate`.",
        "{path}：需要版本 {version}，实际为 {found!r}。请用 `phalanx calibrate` 重新测量。",
    ),
    "measured broken": (
        "{path}: {place}: {why}. Measure again with `phalanx calibrate`.",
        "{path}：{place}：{why}。请用 `phalanx calibrate` 重新测量。",
    ),
    "limit": (
        (
            "Asked for the limit {said!r}. Write a knob ({knobs}), one of <=, >= and =, and a value, such as "
            "tp<=8.{nearest}"
        ),
        "限制 {said!r} 无法识别。请写旋钮（{knobs}）、<=、>= 或 = 之一，再写值，如 tp<=8。{nearest}",
    ),
    "limit of a layer": (
        (
            "Asked for the limit {said!r}. Write a knob ({knobs}) and a value, such as tp<=2, or a layer and one of "
            "{styles}, such as classifier.*=whole.{nearest}"
        ),
        (
            "限制 {said!r} 无法识别。请写旋钮（{knobs}）和值，如 tp<=2；"
            "或写层和 {styles} 之一，如 classifier.*=whole。{nearest}"
        ),
    ),
    "limit one of": (
        "Asked for the limit {said!r}. Write {knob}= and one of {known}.",
        "限制 {said!r} 无效。请写 {knob}= 和 {known} 之一。",
    ),
    "limit number": (
        "Asked for the limit {said!r}, whose value is no whole number. Write one, such as {knob}<=8.",
        "限制 {said!r} 的值不是整数。请写整数，如 {knob}<=8。",
    ),
    "limit many": (
        "limits takes several, found the words {said!r}. Write limits=[{said!r}].",
        "limits 应为列表，实际为 {said!r}。请写 limits=[{said!r}]。",
    ),
    "not above zero": (
        "auto_parallel was asked for {name}={value}. Give a number above 0.",
        "auto_parallel 的 {name}={value} 无效。请给出大于 0 的数。",
    ),
    "not a module": (
        "auto_parallel plans a torch.nn.Module, found {found}. Hand in the model itself.",
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
        "No way to arrange the ranks{asked}{found}. Loosen one, or take another number of ranks.",
        "没有可用的进程排布{asked}{found}。请放宽限制，或换一个进程数。",
    ),
    "keeps to limits": (" keeps to the limits {limits}", "满足限制 {limits}"),
    "computes the model": (" computes this model", "可以计算此模型"),
    "layers left": (
        ": {count} are left, and in each some layer has no way to be computed",
        "：剩下 {count} 种，每种都有某层无法计算",
    ),
    "nothing fits": (
        (
            "No Plan fits: every one needs {least} a rank or more ({where}), most of it {part}, and there are {room}. "
            "Take more ranks, ranks with more memory, or a smaller batch."
        ),
        (
            "没有放得下的方案：每个方案每进程至少需要 {least}（{where}），其中最多的是{part}，而可用 {room}。"
            "请用更多进程、更大内存的设备或更小的批。"
        ),
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
        (
            "strategy.{name} says how to cut the model, and a planner is asked to find out. Leave it out, or say it as "
            "a limit, such as tp=2."
        ),
        "strategy.{name} 规定了如何切分模型，而这正是规划器要找的。请去掉它，或写成限制，如 tp=2。",
    ),
    "plan with servers": (
        (
            "AUTO_PARALLEL plans for workers that hold all parameters, and this job has servers. Launch it without, or "
            "write DATA_PARALLEL."
        ),
        "AUTO_PARALLEL 面向持有全部参数的工作进程，而本任务有参数服务器。请不带服务器启动，或改用 DATA_PARALLEL。",
    ),
    "explain unknown": (
        "explain was asked for {layer!r}, which this model does not call.{nearest} It calls {known}.",
        "explain 查询的 {layer!r} 未被此模型调用。{nearest}被调用的有 {known}。",
    ),
    "and more": ("{names} and {count} more", "{names} 等，另有 {count} 个"),
    "why not": (
        (
            "With {limits} the best is {arrangement}, layers cut: {cut}; {step} a step, {change}, {memory}; most of it "
            "{cause} ({more})."
        ),
        (
            "限制 {limits} 时最优为 {arrangement}，切分的层：{cut}；每步 {step}，{change}，{memory}；"
            "差别最大的是{cause}（{more}）。"
        ),
    ),
    "plan parameters, gradients and optimizer state": (
        "parameters, gradients and optimizer state",
        "参数、梯度与优化器状态",
    ),
    "plan activations": ("activations", "激活"),
    "spent compute": ("compute", "计算"),
    "spent exposed_communication": ("exposed communication", "未被掩盖的通信"),
    "spent pipeline_send": ("pipeline send", "流水线发送"),
    "spent pipeline_bubble": ("pipeline bubble", "流水线空泡"),
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
            "{choices} choices, {priced} simulated; none is faster than {bound} s: the first is within {gap} % of the "
            "best, by this model of time. docs/predict.md says how good that model is."
        ),
        (
            "{choices} 种选择，模拟了 {priced} 种；没有快于 {bound} s 的：按此时间模型，"
            "第一种与最优相差不超过 {gap} %。该模型的精度见 docs/predict.md。"
        ),
    ),
    "choices searched": ("searched: {space}", "搜索范围：{space}"),
    "why not choice": (
        "With {limits} the best is {choice}: {step} a step, {change}, {memory}; most of it {cause} ({more}).",
        "限制 {limits} 时最优为 {choice}：每步 {step}，{change}，{memory}；差别最大的是{cause}（{more}）。",
    ),
    "no choice": (
        (
            "No way to cut the job over {devices} devices keeps to its limits ({limits}). Loosen one, or take another "
            "number of devices."
        ),
        "{devices} 个设备没有满足限制（{limits}）的切分方式。请放宽限制，或换一个设备数。",
    ),
    "why not same": (
        "The answer keeps to {limits} already: {arrangement}, {step} a step.",
        "结果本已满足 {limits}：{arrangement}，每步 {step}。",
    ),
    "why not impossible": ("With {limits}: {why}", "限制 {limits} 时：{why}"),
    "why not nothing": (
        "why_not was asked for nothing. Name a limit, such as tp=1 or classifier.4=column.",
        "why_not 未给出限制。请给出，如 tp=1 或 classifier.4=column。",
    ),
    "none cut": ("none", "无"),
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
    "capture advice": ("Hand in what one training step takes.", "请传入一个训练步所用的数据。"),
    "no Plan file": (
        "no Plan at {path}. Write one with phalanx.plan.save_plan(plan, path).",
        "{path} 处没有方案文件。请用 phalanx.plan.save_plan(plan, path) 写入。",
    ),
    "Plan unreadable": (
        "the Plan in {path} cannot be read: {why}. Name a file.",
        "{path} 中的方案无法读取：{why}。请给出文件。",
    ),
    "Plan broken": ("{path} does not hold a Plan: {why}", "{path} 中不是方案：{why}"),
    "Plan field": ("{path}: there is no such field.{nearest}", "{path}：没有此字段。{nearest}"),
    "Plan value": ("{path}: {why}", "{path}：{why}"),
}
"""English and Chinese by key; fields in braces."""
