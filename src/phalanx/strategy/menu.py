"""Fleet strategy settings that were renamed, are refused or need another, by name."""

from __future__ import annotations

RENAMED = {
    "balance_replicas": 'balance = "replicas"',
    "forward_recompute": "recompute",
    "recompute_checkpoints": 'recompute_configs = {"checkpoints": [...]}',
    "use_local_sgd": "localsgd",
    "save_to_prototxt": 'save("menu.yaml")',
    "load_from_prototxt": 'load("menu.yaml")',
}
"""Settings of older Fleet releases, and what replaced them."""

NOT_YET = frozenset(
    (
        "asp",
        "build_strategy",
        "elastic",
        "exec_strategy",
        "execution_strategy",
        "qat",
        "qat_configs",
    )
)
"""Fleet settings this version knows by name and refuses, because it would not act on them."""

_PLANNED = (
    "the planner needs a batch of the model's data. Leave it out, and write plan = px.auto_parallel(model, sample, "
    'loss_fn, limits=["pp=1"]).plan, then fleet.distributed_model(model, plan=plan)'
)

INSTEAD = {
    "auto": _PLANNED,
    "auto_search": _PLANNED,
    "semi_auto": 'say which layers are cut, px.shard(model, {"classifier": "column"})',
}
"""Fleet settings that are calls here."""

NEEDS = {
    ("a_sync_configs", "max_merge_var_num"): "half_async",
    ("a_sync_configs", "local_optimizer"): "k_steps",
}
"""Keys that act only with another key of their dictionary."""
