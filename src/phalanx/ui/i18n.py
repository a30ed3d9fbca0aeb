"""`speaker`: translations of the console: English and Chinese."""

from __future__ import annotations

from collections.abc import Callable

LANGUAGES = {"en": "English", "zh": "中文"}

TABLE: dict[str, tuple[str, str]] = {
    "console": ("Phalanx console", "Phalanx 控制台"),
    "skip": ("Skip to the content", "跳到正文"),
    "jobs": ("Jobs", "作业"),
    "job": ("Job", "作业"),
    "new job": ("New job", "新建作业"),
    "queue": ("Queue", "队列"),
    "datasets": ("Datasets", "数据集"),
    "codes": ("Code", "代码"),
    "workspace": ("Workspace", "工作空间"),
    "language": ("Language", "语言"),
    "sign out": ("Sign out", "退出"),
    "sign in": ("Sign in", "登录"),
    "token": ("Token", "令牌"),
    "sign in help": (
        "Paste a token. `phalanx token add NAME` makes one on the server.",
        "请粘贴令牌。在服务器上用 `phalanx token add NAME` 创建。",
    ),
    "token refused": (
        "The token is unknown or has expired. Make a new one with `phalanx token add NAME`.",
        "令牌不存在或已失效。请用 `phalanx token add NAME` 新建。",
    ),
    "name": ("Name", "名称"),
    "state": ("State", "状态"),
    "reason": ("Reason", "原因"),
    "owner": ("Owner", "所有者"),
    "backend": ("Backend", "后端"),
    "priority": ("Priority", "优先级"),
    "submitted": ("Submitted", "提交时间"),
    "started": ("Started", "开始时间"),
    "ended": ("Ended", "结束时间"),
    "duration": ("Duration", "用时"),
    "attempt": ("Attempt", "尝试"),
    "attempts": ("Attempts", "尝试"),
    "cause": ("Cause", "失败原因"),
    "no jobs": ("No jobs yet.", "尚无作业。"),
    "no jobs help": (
        "Submit one with `phalanx job submit job.yaml`.",
        "用 `phalanx job submit job.yaml` 提交。",
    ),
    "filter": ("Filter", "筛选"),
    "all states": ("All states", "全部状态"),
    "search": ("Name contains", "名称包含"),
    "phases": ("Phases", "阶段"),
    "hang": ("The job is stalled", "作业停滞不前"),
    "slow": ("Ranks wait for a slow one", "各进程等待较慢的进程"),
    "tables": ("Tables of the parameter servers", "参数服务器的表"),
    "failure": ("Why it failed", "失败原因"),
    "rank": ("Rank", "进程"),
    "node": ("Node", "节点"),
    "exit code": ("Exit code", "退出码"),
    "logs": ("Logs", "日志"),
    "follow": ("Follow", "跟随"),
    "no logs ended": ("No rank wrote anything.", "没有任何进程输出。"),
    "no logs": ("No rank has written anything yet.", "尚无任何进程输出。"),
    "empty log": ("This rank wrote nothing.", "该进程没有输出。"),
    "quiet log": ("This rank has written nothing yet.", "该进程尚无输出。"),
    "dropped": (
        "Older lines are not shown; `phalanx job logs JOB` has them all.",
        "较早的行未显示；`phalanx job logs JOB` 可查看全部。",
    ),
    "charts": ("Loss, speed and what else is reported", "损失、速度与其他上报"),
    "loss": ("loss", "损失"),
    "samples_per_s": ("samples/s", "样本/秒"),
    "replicas": ("replicas", "副本"),
    "share": ("share of samples", "样本占比"),
    "ms_per_sample": ("ms/sample", "毫秒/样本"),
    "steps_per_s": ("steps/s", "步/秒"),
    "step": ("step", "步"),
    "no charts": (
        "Nothing reported yet. Model.train reports by itself; in your own loop call phalanx.report(loss=loss).",
        "尚无上报。Model.train 会自动上报；自写训练循环请调用 phalanx.report(loss=loss)。",
    ),
    "no charts ended": (
        "Nothing was reported. Model.train reports by itself; in your own loop call phalanx.report(loss=loss).",
        "没有上报。Model.train 会自动上报；自写训练循环请调用 phalanx.report(loss=loss)。",
    ),
    "usage": ("Resources used", "资源使用"),
    "cpu used": ("processor cores", "处理器（核）"),
    "memory used": ("memory, GiB", "内存（GiB）"),
    "gpu used": ("GPUs in use", "使用中的 GPU"),
    "gpu memory used": ("GPU memory, GiB", "显存（GiB）"),
    "memory peak": ("peak", "峰值"),
    "no usage": (
        "Nothing measured yet. Usage is sampled every 5 s for local and Slurm jobs, not on Kubernetes.",
        "尚无数据。本机与 Slurm 的节点每 5 秒上报其进程的资源使用；Kubernetes 的 Pod 不上报。",
    ),
    "no usage ended": (
        "Nothing was measured. Usage is sampled every 5 s for local and Slurm jobs, not on Kubernetes.",
        "没有数据。本机与 Slurm 的节点每 5 秒上报其进程的资源使用；Kubernetes 的 Pod 不上报。",
    ),
    "members": ("Changes of the ranks", "进程变动"),
    "epoch": ("epoch", "成员纪元"),
    "ranks": ("ranks", "进程数"),
    "stall_s": ("stood still, s", "停顿（秒）"),
    "redone": ("samples computed again", "重算样本数"),
    "last report": ("Last report of each rank", "各进程最近上报"),
    "plan": ("Plan", "并行方案"),
    "events": ("Events", "事件"),
    "time": ("Time", "时间"),
    "kind": ("Kind", "类型"),
    "message": ("Message", "内容"),
    "resources": ("Resources", "资源"),
    "in use": ("in use", "使用中"),
    "of": ("of", "共"),
    "memory": ("memory", "内存"),
    "processes": ("Processes", "进程"),
    "spec": ("Spec", "配置"),
    "spec help": ("Resubmitting this trains the same thing.", "用此配置重新提交将训练同样的内容。"),
    "stop": ("Stop", "停止"),
    "retry": ("Run again", "重新运行"),
    "copy": ("Change and submit", "修改并提交"),
    "stop question": ("Stop this job? It has {grace} to save.", "停止该作业？它有 {grace} 用于保存。"),
    "submit": ("Submit", "提交"),
    "form": ("Form", "表单"),
    "required": ("required", "必填"),
    "default": ("Default: {value}", "默认：{value}"),
    "yaml help": (
        "A YAML list, such as: - {name: mnist, mount: data}",
        "YAML 列表，例如：- {name: mnist, mount: data}",
    ),
    "lines help": ("One per line.", "每行一个。"),
    "pairs help": ("NAME=value, one per line.", "每行一个 NAME=value。"),
    "form wrong": ("Not submitted. Fix the fields marked below.", "未提交。请按各字段的提示修改。"),
    "position": ("Position", "位次"),
    "queue empty": ("The queue is empty.", "没有等待中的作业。"),
    "capacity": ("This machine", "本机"),
    "uri": ("Where", "位置"),
    "created": ("Created", "创建时间"),
    "none yet": ("None yet.", "尚无。"),
    "add with": ("Add one with {command}", "用 {command} 添加"),
    "not found": ("There is no such page, or you may not see it.", "页面不存在，或您无权查看。"),
    "went wrong": ("Something went wrong", "操作未成功"),
    "back": ("Back to the jobs", "返回作业列表"),
    "updated": ("Updated", "已更新"),
    "queued": ("queued", "排队中"),
    "preparing": ("preparing", "准备中"),
    "running": ("running", "运行中"),
    "restarting": ("restarting", "重启中"),
    "stopping": ("stopping", "停止中"),
    "succeeded": ("succeeded", "成功"),
    "failed": ("failed", "失败"),
    "stopped": ("stopped", "已停止"),
    "cause user_code": ("error in the training code", "训练代码出错"),
    "cause oom": ("out of memory", "内存不足"),
    "cause node_failure": ("a node failed", "节点故障"),
    "cause preempted": ("preempted", "被抢占"),
    "cause timeout": ("ran longer than allowed", "超过最长运行时间"),
    "cause hang": ("hung", "无响应"),
    "cause setup": ("could not be set up", "准备失败"),
    "cause backend": ("the backend refused or lost it", "后端拒绝或丢失"),
}

Say = Callable[..., str]


def speaker(language: str) -> Say:
    """Return the function that translates to `language`, one of LANGUAGES: `say("default", value=5)`."""
    column = list(LANGUAGES).index(language)

    def say(key: str, **values: object) -> str:
        return TABLE[key][column].format(**values) if values else TABLE[key][column]

    return say


def best(accepted: str) -> str:
    """Return which of LANGUAGES a browser's Accept-Language header prefers."""
    for part in accepted.split(","):
        language = part.split(";")[0].strip().lower().partition("-")[0]
        if language in LANGUAGES:
            return language
    return "en"
