"""`find_schedule_conflict`: which micro-batches the software of a run refuses in its schedule (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.i18n import tr

if TYPE_CHECKING:
    from phalanx.auto.predict.run_spec import RunSpec


def find_schedule_conflict(run: RunSpec) -> str | None:
    """Return why its software does not take the micro-batches of a run in its schedule; None if it does."""
    par, count, rules = run.parallel, run.full_micro_batches, run.habits.pipelines
    if par.pp == 1 or run.is_v:
        return None
    if run.is_interleaved and rules in ("megatron", "megatron-core"):
        return _find_interleaving_conflict(count, par.pp, par.vpp, is_core=rules == "megatron-core")
    if (par.vpp > 1 or run.schedule == "zero-bubble") and count % max(1, count // par.pp):
        return tr(
            "{count} micro-batches over {stages} stages do not make rounds of one size, of {stages} or more: PyTorch "
            "refuses them with vpp={virtual} and schedule {schedule}. Choose a multiple of {stages}",
            count=count,
            stages=par.pp,
            virtual=par.vpp,
            schedule=run.schedule,
        )
    if run.order.kind == "1f1b" and count < par.pp and rules == "torch":
        return tr(
            "{count} micro-batches over {stages} stages: PyTorch's 1F1B refuses fewer micro-batches than stages. "
            "Choose {stages} or more, or the schedule gpipe, as Phalanx does",
            count=count,
            stages=par.pp,
        )
    return None


def _find_interleaving_conflict(count: int, stages: int, virtual: int, *, is_core: bool) -> str | None:
    """Return why Megatron does not interleave so many micro-batches; None if it does."""
    if is_core and count < stages:
        return tr(
            "{count} micro-batches over {stages} stages with vpp={virtual}: Megatron Core refuses to interleave fewer "
            "than stages. Choose {stages} or more",
            count=count,
            stages=stages,
            virtual=virtual,
        )
    if not is_core and count % stages:
        return tr(
            "{count} micro-batches over {stages} stages with vpp={virtual}: Megatron-LM refuses to interleave them. "
            "Choose a multiple of {stages}",
            count=count,
            stages=stages,
            virtual=virtual,
        )
    return None
