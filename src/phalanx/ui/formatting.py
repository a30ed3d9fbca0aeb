"""Format times, durations, numbers and job states for pages (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from phalanx.jobs.models import Event, Job, JobState
from phalanx.ui.i18n import WORDS, Say
from phalanx.ui.reasons import translate_reason
from phalanx.units import format_gib, format_length


def when(time: datetime | None) -> Markup:
    """Return a time in UTC, to the second; a dash for none."""
    if time is None:
        return Markup("–")
    utc = time.astimezone(UTC)
    return Markup('<time datetime="{}" title="UTC">{}</time>').format(
        utc.isoformat(), utc.strftime("%Y-%m-%d %H:%M:%S")
    )


def ago(time: datetime | None) -> Markup:
    """Return a time that the page shows as how long ago it is; to the second in UTC without JavaScript."""
    return Markup("–") if time is None else Markup("<span data-ago>{}</span>").format(when(time))


def length(seconds: float | None) -> str:
    """Return a length of time; a dash for none."""
    return "–" if seconds is None else format_length(seconds)


def span(start: datetime | None, end: datetime | None) -> str:
    """Return how long something took, or has taken so far."""
    if start is None:
        return "–"
    return format_length(((end or datetime.now(UTC)) - start).total_seconds())


def number(value: Any) -> str:
    """Return a number that was reported, to five digits; a dash for none."""
    is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
    return f"{value:.5g}" if is_number else str(value or "–")[:40]


def badge(say: Say) -> Callable[[JobState], Markup]:
    """Return the function that shows a state in the language of `say`."""

    def show_badge(state: JobState) -> Markup:
        return Markup('<span class="badge {}">{}</span>').format(state, say(state))

    return show_badge


def event_kind(say: Say) -> Callable[[str], str]:
    """Return the function that names the kind of an event in the language of `say`; others stay as they are."""
    return lambda kind: say(f"event {kind}") if f"event {kind}" in WORDS else kind


def reason_text(language: str) -> Callable[[str], str]:
    """Return the function that puts a sentence of ours about a job into `language`; others stay as they are."""
    return translate_reason if language == "zh" else lambda text: text


@dataclass(frozen=True)
class PhaseSpan:
    """A state that a job was or is in, why, and for how long."""

    state: JobState
    since: datetime
    lasted: str
    reason: str


def phases(events: Sequence[Event], ended: datetime | None) -> list[PhaseSpan]:
    """Return the states a job went through, first to last, with how long it was in each; an end lasts no time."""
    changes = [(JobState(event.data["to"]), event) for event in events if event.data.get("to") in set(JobState)]
    ends = [*(event.time for _, event in changes[1:]), ended][: len(changes)]
    return [
        PhaseSpan(state, event.time, "" if state.is_terminal else span(event.time, end), event.message)
        for (state, event), end in zip(changes, ends, strict=True)
    ]


def prose(text: str) -> Markup:
    """Return a text of ours with what stands between backticks as code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else Markup("{}").format(part)
        for index, part in enumerate(parts)
    )


def needs(say: Say) -> Callable[[Job], str]:
    """Return the function that says in short what a job takes: `2 nodes, each: 2 ranks, 4 CPU cores, 8.0 GiB`."""

    def describe(job: Job) -> str:
        resources = job.spec.get("resources", {})
        parts = [_count(say, ("one rank", "rank count"), _range(resources, "procs_per_node"))]
        if resources.get("cpu"):
            parts.append(_count(say, ("one core", "core count"), resources["cpu"]))
        if resources.get("memory"):
            parts.append(format_gib(resources["memory"]))
        if resources.get("gpu"):
            parts.append(_count(say, ("one GPU", "GPU count"), resources["gpu"]))
        each, nodes = say("list comma").join(parts), _range(resources, "nodes")
        text = each if nodes == 1 else say("on each node", nodes=nodes, each=each)
        servers = (job.spec.get("servers") or {}).get("count")
        return say("beside servers", workers=text, servers=servers) if servers else text

    return describe


def _range(resources: Mapping[str, Any], field: str) -> int | str:
    """Return a number of nodes or ranks; those of an elastic job are a range as 1:4."""
    most, least = resources.get(field, 1), resources.get(f"least_{field}")
    return f"{least}:{most}" if least else int(most)


def _count(say: Say, keys: tuple[str, str], count: float | str) -> str:
    """Return a number of things, or a range as 1:4, in words: `keys` are of one and of more."""
    return say(keys[count != 1], count=count if isinstance(count, str) else f"{count:g}")
