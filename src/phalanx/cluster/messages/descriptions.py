"""What is wrong with descriptions of clusters, devices and runs, in English and in Chinese."""

from __future__ import annotations

DESCRIPTIONS: dict[str, tuple[str, str]] = {
    "not text": (
        "{path} is no text in UTF-8. Give a file of JSON.",
        "{path} 不是 UTF-8 文本。请给出 JSON 文件。",
    ),
    "no run": (
        "{path} has no run. Write each as a JSON object; docs/predict.md has the format.",
        "{path} 中没有任务描述。请把每个任务写成一个 JSON 对象；格式见 docs/predict.md。",
    ),
    "no run but collectives": (
        (
            "{path} has no run, only single collectives: {count} ({kinds}). Write each run as a JSON object; "
            "docs/predict.md has the format."
        ),
        (
            "{path} 中没有任务描述，只有单次集合通信的描述 {count} 个（{kinds}）。"
            "请把每个任务写成一个 JSON 对象；格式见 docs/predict.md。"
        ),
    ),
    "collectives skipped": (
        "{path}: skipped single collectives, which are no runs: {count} ({kinds}).",
        "{path}：已跳过单次集合通信的描述 {count} 个（{kinds}），它们不是训练任务。",
    ),
    "limit not searched": (
        "Asked for the limit {said!r}, and {knob} is not searched: {why}. Limits may be on {knobs}.",
        "限制 {said!r} 中的 {knob} 不在搜索范围内：{why}。可限制的有 {knobs}。",
    ),
    "fixed": (
        "every choice has {knob}=1, and px.predict prices a run with another",
        "每种选择中 {knob}=1，其他值可用 px.predict 计算",
    ),
    "fixed schedule": (
        "it is the file's, so write another there",
        "以文件所写为准，请在文件中修改",
    ),
    "fixed sequence_parallel": (
        "it is on wherever tp is above 1",
        "tp 大于 1 时均启用",
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
    "run hidden": (
        "hidden ({hidden}) must be heads ({heads}) or more",
        "hidden（{hidden}）应不小于 heads（{heads}）",
    ),
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
        "batch.global ({rows}) must be dp ({copies}) or more: each replica reads a sequence at least",
        "batch.global（{rows}）应不小于 dp（{copies}）：每个副本至少读取一个序列",
    ),
    "run stages": (
        "{layers} layers do not make {stages} x {virtual} stages",
        "{layers} 层不足以划分为 {stages} x {virtual} 个阶段",
    ),
    "run cut heads": (
        "model.heads ({heads}) must be a multiple of parallel.tp ({ranks}): each rank computes whole heads",
        "model.heads（{heads}）应为 parallel.tp（{ranks}）的整数倍：每个进程计算完整的头",
    ),
    "run cut groups": (
        (
            "one of model.kv_heads ({groups}) and parallel.tp ({ranks}) must divide the other: each rank holds whole "
            "heads of keys and values, copies where there are fewer than ranks"
        ),
        (
            "model.kv_heads（{groups}）与 parallel.tp（{ranks}）中一个应整除另一个："
            "每个进程持有完整的键值头，头少于进程时持有副本"
        ),
    ),
    "run cut sequence": (
        "model.seq ({tokens}) must be a multiple of parallel.cp ({ranks}), and with sequence_parallel of tp times that",
        "model.seq（{tokens}）应为 parallel.cp（{ranks}）的整数倍；启用 sequence_parallel 时应为它与 tp 之积的整数倍",
    ),
    "run cut inner": (
        "the feed-forward width ({columns}) must be a multiple of parallel.tp ({ranks}): each rank computes as much",
        "前馈层宽度（{columns}）应为 parallel.tp（{ranks}）的整数倍：各进程计算量相同",
    ),
    "run cut ranks of experts": (
        "parallel.ep ({experts}) must divide tp x cp x dp ({ranks}): experts are dealt to the ranks of one stage",
        "parallel.ep（{experts}）应整除 tp x cp x dp（{ranks}）：专家分给同一阶段的进程",
    ),
    "run cut experts": (
        "model.experts ({experts}) must be a multiple of parallel.ep ({ranks}), and above 0 where ep is above 1",
        "model.experts（{experts}）应为 parallel.ep（{ranks}）的整数倍；ep 大于 1 时应大于 0",
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
    "cluster assumed": ("assumed of the cluster: {what}", "对集群的假设：{what}"),
    "assumed cores": (
        "{count} float32 operations a cycle and core at {hertz} GHz",
        "每核每周期 {count} 次 float32 运算，频率 {hertz} GHz",
    ),
    "assumed memory": (
        "{rate} GB/s of memory a core; `phalanx calibrate` measures, and `here` uses it",
        "每核内存带宽 {rate} GB/s；`phalanx calibrate` 可实测，集群名 here 即用实测值",
    ),
    "assumed nodes": ("{count} nodes, all as this one", "{count} 个节点，均与本机相同"),
    "assumed between": ("{rate} Gb/s between them", "节点间 {rate} Gb/s"),
    "assumed gpu": ("{gpu} is {device}, with its usual network", "{gpu} 即 {device}，网络取其常见配置"),
    "assumed named": ("{device} on every server of {path}", "{path} 的每台服务器都是 {device}"),
    "assumed here": (
        "{device}, as here, on every server of {path}; device= says another",
        "{path} 的每台服务器都与本机相同（{device}）；可用 device= 另行指定",
    ),
    "measured near": (
        "{ranks} ranks are reckoned from the figures of {near}: `phalanx calibrate -n {ranks}` measures them",
        "{ranks} 个进程的数值由 {near} 个进程的推算：可用 `phalanx calibrate -n {ranks}` 实测",
    ),
    "measured before": (
        "measured with {name} {then}, which is {now} now: `phalanx calibrate` measures again",
        "测量时 {name} 为 {then}，现为 {now}：请用 `phalanx calibrate` 重新测量",
    ),
    "cluster differs": (
        (
            "The nodes differ ({cluster}), and every rank waits for the slowest: reckoned as {reckoned}. Describe some "
            "of the nodes alone to see what they would do without the others."
        ),
        (
            "各节点不同（{cluster}），每个进程都要等最慢的：按 {reckoned} 计算。"
            "可只描述其中一部分节点，看没有其他节点时如何。"
        ),
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
    "gpus differ": (
        (
            "Asked to detect this host, found different GPUs: {names}. Choose equal ones with CUDA_VISIBLE_DEVICES, "
            "or describe the cluster in a file (docs/calibrate.md)."
        ),
        (
            "检测本机时发现不同的卡：{names}。请用 CUDA_VISIBLE_DEVICES 选择相同的卡，"
            "或用文件描述集群（docs/calibrate.md）。"
        ),
    ),
    "gpu unknown": (
        (
            "Asked to detect this host, found {gpu}, which has no preset. Known: {known}. Describe it in a file, "
            "under devices (docs/calibrate.md)."
        ),
        "检测本机时发现 {gpu}，没有其内置参数。已有：{known}。请在文件的 devices 下描述它（docs/calibrate.md）。",
    ),
    "device not known": ("which is not known", "未知"),
    "device could be": ("which could be {names}", "可能指 {names}"),
    "device": (
        (
            "Asked for the device {name!r}, {why}.{nearest} Known: {known}. Describe any other in a cluster file "
            "(docs/calibrate.md), as [[devices]] with the figures of its maker."
        ),
        (
            "设备 {name!r}：{why}。{nearest}可用：{known}。"
            "其他设备请在集群文件（docs/calibrate.md）的 [[devices]] 中按厂商参数描述。"
        ),
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
        "{path} is not there. Measure this machine with `phalanx calibrate`, or name a cluster as h100x8 or cpux2.",
        "没有 {path}。请用 `phalanx calibrate` 测量本机，或给出集群，如 h100x8 或 cpux2。",
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
}
"""English and Chinese by key; fields in braces."""
