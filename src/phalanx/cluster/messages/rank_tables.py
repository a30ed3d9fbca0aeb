"""What is wrong with rank tables, in English and in Chinese."""

from __future__ import annotations

RANK_TABLES: dict[str, tuple[str, str]] = {
    "table unreadable": (
        (
            "The rank table {path} cannot be read ({why}). Correct the path, or make one with "
            "`phalanx rank-table make --hosts 10.0.0.1,10.0.0.2 --out rank_table.json`."
        ),
        (
            "无法读取 rank table {path}（{why}）。请改正路径，或用 "
            "`phalanx rank-table make --hosts 10.0.0.1,10.0.0.2 --out rank_table.json` 生成一个。"
        ),
    ),
    "table no text": ("it is no text", "不是文本"),
    "table not JSON": (
        "{source}: no JSON at line {line}, column {column} ({why}). Correct it there.",
        "{source}：第 {line} 行第 {column} 列不是 JSON（{why}）。请改正该处。",
    ),
    "table comma": (
        "{source}: the comma before a closing bracket in line {line} is passed over",
        "{source}：第 {line} 行右括号前的逗号已忽略",
    ),
    "table board": (
        "{source}: board_id {board} says {name}, but this machine is {machine}. {advice}.",
        "{source}：board_id {board} 表示 {name}，但本机是 {machine}。{advice}。",
    ),
    "table board here": ("Write {board} if it is meant for this host", "若用于本机，请写 {board}"),
    "table board none": ("Use a table of version 1.0, without one", "请使用不含 board_id 的 1.0 版"),
    "table devices count": (
        (
            "{source}: {server} has {count} devices, where collectives of other frameworks want 1, 2, 4 or 8; it works "
            "here. Where groups of 4 devices are linked, list 4 or 8 for the full speed of the links"
        ),
        (
            "{source}：{server} 有 {count} 个设备，其他框架的集合通信要求 1、2、4 或 8 个；此处可用。"
            "若每 4 个设备互连，列出 4 或 8 个可用满链路速度"
        ),
    ),
    "table devices fours": (
        (
            "{source}: {server} has devices {devices}, of both fours 0-3 and 4-7; it works here. Where only the "
            "devices of a four are linked with each other, list those of one"
        ),
        ("{source}：{server} 的设备 {devices} 跨 0-3 与 4-7 两组；此处可用。若只有同组的 4 个设备互连，请只列一组"),
    ),
    "table empty": (
        "{source}: the table lists no device. List at least one.",
        "{source}：表中没有设备。请至少列出一个。",
    ),
    "table rank twice": (
        (
            "{source}: rank_id {rank} is given twice, to device {device} of {server} and device {other} of "
            "{other_server}. Number the ranks 0 to {last}."
        ),
        (
            "{source}：rank_id {rank} 重复，分别给了 {server} 的设备 {device} 和 {other_server} 的设备 {other}。"
            "请用 0 到 {last} 编号。"
        ),
    ),
    "table device twice": (
        (
            "{source}: device {device} of {server} is listed twice, for ranks {rank} and {other}. Give each rank a "
            "device of its own."
        ),
        "{source}：{server} 的设备 {device} 列了两次，用于 rank {rank} 和 {other}。请为每个 rank 指定各自的设备。",
    ),
    "table rank missing": (
        (
            "{source}: {count} devices need rank_id 0 to {last}, but {missing} is missing and {most} is given. Number "
            "them from 0 without gaps."
        ),
        "{source}：{count} 个设备需要 rank_id 0 到 {last}，但缺少 {missing}，却有 {most}。请从 0 起连续编号。",
    ),
    "table wrong": ("{source}: {path} {what}", "{source}：{path} {what}"),
    "table itself": ("the table", "该表"),
    "table object": (
        "must be an object in braces, found {found}. Correct it.",
        "应为花括号中的对象，实际为 {found}。请改正。",
    ),
    "table key": ("has no {name!r}, only {found}. Add it.", "没有 {name!r}，只有 {found}。请补上。"),
    "table nothing": ("nothing", "空"),
    "table list": (
        "must be a list in brackets, found {found}. Correct it.",
        "应为方括号中的列表，实际为 {found}。请改正。",
    ),
    "table number": (
        "must be a whole number of at least 0, found {found}. Correct it.",
        "应为不小于 0 的整数，实际为 {found}。请改正。",
    ),
    "table text": ("must be text in quotes, found {found}. Correct it.", "应为引号中的文本，实际为 {found}。请改正。"),
    "table count": (
        "is {said}, but the table lists {found} {of}. Correct one of them.",
        "为 {said}，但表中列出了 {found} 个{of}。请改正其一。",
    ),
    "table groups": ("groups", "组"),
    "table instances": ("instances", "实例"),
    "table devices": ("devices", "设备"),
    "table servers": ("servers", "服务器"),
    "table interfaces": ("interfaces", "网卡"),
    "table layout": (
        (
            "is in no layout known here: it has neither 'group_list' (with board_id) nor 'server_list' (with version "
            "1.0). Make one with `phalanx rank-table make --hosts 10.0.0.1,10.0.0.2`."
        ),
        (
            "不是已知的格式：既没有 'group_list'（含 board_id），也没有 'server_list'（1.0 版）。"
            "请用 `phalanx rank-table make --hosts 10.0.0.1,10.0.0.2` 生成一个。"
        ),
    ),
    "table one group": (
        "has {count} groups, and a job is started from one. Write a table for each job.",
        "有 {count} 个组，而一个任务由一个组启动。请为每个任务各写一个表。",
    ),
    "table board unknown": ("must be {known}, found {found}. Correct it.", "应为 {known}，实际为 {found}。请改正。"),
    "table or": (" or ", " 或 "),
    "table instance": (
        "(rank_id {rank}) has {count} devices, and a process runs on one. Give each an instance of its own.",
        "（rank_id {rank}）有 {count} 个设备，而一个进程只用一个。请为每个设备各写一个实例。",
    ),
    "table on devices": (
        ("is {count}, but interfaces are said to be on the devices, and a server has {most}. Correct one of them."),
        "为 {count}，但网卡写明在设备上，而一台服务器有 {most} 个设备。请改正其一。",
    ),
    "table version": (
        "must be 1.0, the version read here, found {found}. Make a table of 1.0.",
        "应为 1.0（此处可读的版本），实际为 {found}。请生成 1.0 版的表。",
    ),
    "table server twice": (
        "{name} is listed twice. List each server once, with its devices.",
        "{name} 列了两次。每台服务器只列一次，写上它的设备。",
    ),
    "table address": ("must be an IP address, found {found}. Correct it.", "应为 IP 地址，实际为 {found}。请改正。"),
    "table server": (
        "must be the server's IPv4 address, found {found}. Write e.g. 10.0.0.1.",
        "应为服务器的 IPv4 地址，实际为 {found}。请写成如 10.0.0.1。",
    ),
    "table status": (
        "must be {wanted}, found {found}: what writes the table has not finished. Wait for it.",
        "应为 {wanted}，实际为 {found}：写表的程序尚未完成。请等待其完成。",
    ),
}
