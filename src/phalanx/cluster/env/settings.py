"""`Setting`: the registry of environment variables that Phalanx reads or writes, and warnings for unsupported ones."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phalanx.cluster.env.variables import ROWS
from phalanx.i18n import language

_ACCESS = {"r": "read", "w": "written", "rw": "read, written", "-": "ignored"}

_SECRET_NAME = re.compile(r"SECRET|PASSW|_PWD$|TOKEN|CREDENTIAL|API_?KEY|(?:^|_)KEY(?:$|_)", re.IGNORECASE)
_SECRET_IN_URL = re.compile(r"://[^/@\s]*@")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One environment variable."""

    name: str
    family: str
    """Whose word it is: phalanx, torchrun, fleet, slurm, mpi, rank table, kubeflow, system, or dead."""

    access: str
    """read, written, both, or ignored."""

    default: str
    """What is assumed when it is unset; empty when nothing is."""

    meaning_en: str
    meaning_zh: str


TABLE: tuple[Setting, ...] = tuple(
    Setting(name=name, family=family, access=_ACCESS[access], default=default, meaning_en=english, meaning_zh=chinese)
    for family, rows in ROWS.items()
    for name, access, default, english, chinese in rows
)
"""Every setting, families together."""

_OFF = ("", "0", "false", "False")
"""Values that ask for nothing."""


def warn_unsupported(env: Mapping[str, str] | None = None) -> None:
    """Warn of each variable of older frameworks that has no effect here, and say what to use instead.

    Args:
        env: Variables to look at; the process's own when omitted.
    """
    env = os.environ if env is None else env
    for setting in TABLE:
        if setting.family == "dead" and (value := env.get(setting.name, "").strip()) not in _OFF:
            meaning = setting.meaning_zh if language(env) == "zh" else setting.meaning_en
            warnings.warn(f"{setting.name}={value}: {meaning}", UserWarning, stacklevel=3)


def shown_value(name: str, value: str) -> str:
    """Return `value` as it may be shown: secrets, and passwords inside URLs, are masked."""
    if value and _SECRET_NAME.search(name):
        return "******"
    return _SECRET_IN_URL.sub("://******@", value)


def markdown(settings: Iterable[Setting] = TABLE) -> str:
    """Return the table as the page `docs/settings.md`."""
    lines = [
        "# Settings",
        "",
        "All environment variables that Phalanx reads or writes. `make docs` makes this page from a table in the code;",
        "`phalanx env --list` shows it with the current values.",
        "",
        "| variable | family | access | default | meaning | 含义 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for s in settings:
        default = f"`{s.default}`" if s.default else ""
        lines.append(f"| `{s.name}` | {s.family} | {s.access} | {default} | {s.meaning_en} | {s.meaning_zh} |")
    return "\n".join(lines) + "\n"
