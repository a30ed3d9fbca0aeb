"""What the user typed, before anything was looked at: one field per flag."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

DEFAULT_PORT = 29500
"""Port on the first host at which the launchers of several hosts meet, unless `--http_port` says
otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The flags of `phalanx run`; None or empty where the user said nothing."""

    training_script: str
    training_script_args: tuple[str, ...] = ()
    gpus: str | None = None
    nproc_per_node: int | None = None
    ips: str | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    http_port: int | None = None
    servers: str = ""
    workers: str = ""
    heter_workers: str = ""
    server_num: int | None = None
    worker_num: int | None = None
    heter_worker_num: int | None = None
    log_dir: str = "log"
    log_format: str | None = None
    max_restarts: int = 0
    timeout_s: float = 60.0
    language: str = "en"
    wants_servers: bool = field(default=False)
    """Started as `launch_ps`, so parameter-server mode is meant whatever the flags."""

    def banner_items(self) -> list[tuple[str, str]]:
        """Return the 13 settings of the banner, sorted by name, as (name, shown value)."""
        shown = {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name in _BANNER}
        shown["ips"] = self.ips or "127.0.0.1"
        shown["training_script_args"] = str(list(self.training_script_args))
        return sorted(shown.items())


_BANNER = {
    "gpus",
    "heter_worker_num",
    "heter_workers",
    "http_port",
    "ips",
    "log_dir",
    "nproc_per_node",
    "server_num",
    "servers",
    "training_script",
    "training_script_args",
    "worker_num",
    "workers",
}
