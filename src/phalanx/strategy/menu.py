"""Settings by name: those that were renamed, those this version refuses, and those that do not act, with the reason."""

from __future__ import annotations

RENAMED = {
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

WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "a_sync_configs": {
        "send_queue_size": "queues to the servers are bounded by bytes",
        "min_send_grad_num_before_recv": "rows are read when a forward pass asks for them",
        "thread_pool_size": "one connection per server carries all tables",
        "send_wait_times": "nothing waits for more gradients to come",
        "independent_recv_thread": "rows are read when a forward pass asks for them",
        "launch_barrier": "workers wait for servers and each other whenever they need to",
    },
    "amp_configs": {
        "custom_white_list": "torch's autocast decides by operator",
        "custom_black_list": "torch's autocast decides by operator",
        "custom_black_varnames": "torch's autocast decides by operator",
        "use_fp16_guard": "the whole forward pass and the loss are under autocast",
        "use_optimizer_fp16": "the optimizer always updates float32 values",
    },
    "recompute_configs": {
        "checkpoint_shape": "offloaded tensors keep the shape they have",
        "enable_tuning": "nothing searches for what to compute again; name it in checkpoints",
        "refined_ops_patterns": "selective=True keeps matrix products and convolutions",
    },
    "sharding_configs": {
        "segment_strategy": "units say what is gathered together",
        "sharding_segment_strategy": "units say what is gathered together",
        "segment_broadcast_MB": "units say what is gathered together",
        "segment_anchors": "units say what is gathered together",
        "hybrid_dp": "ranks beyond sharding_degree hold further copies",
        "gradient_merge_acc_step": "gradient_merge accumulates",
        "optimize_cast": "amp says what is cast",
        "pp_allreduce_in_optimize": "gradients are reduced before the update",
        "enable_tuning": "nothing searches for the degree",
        "use_calc_stream": "collectives run where torch runs them",
        "mp_degree": "hybrid_configs make the mesh",
        "dp_degree": "hybrid_configs make the mesh",
        "pp_degree": "hybrid_configs make the mesh",
    },
    "pipeline_configs": {
        "p2p_cache_shape": "shapes are known before the first step",
        "enable_partial_send_recv": "full activations are sent",
    },
    "tensor_parallel_configs": {"tensor_init_seed": "shards are cut from the values the layer was made with"},
    "hybrid_configs": {
        "enable_optimizer_timer": "the event file has the time of each step",
        "split_norm_comm": "one all-reduce per group of ranks carries all norms",
        "mp_configs": "tensor_parallel has no tuning switches",
        "pp_configs": "the schedule decides",
        "sharding_configs": "strategy.sharding_configs decides",
        "ep_degree": "there are no expert layers",
        "moe_sharding_degree": "there are no expert layers",
        "cp_degree": "sep_degree cuts sequences",
        "cp_sharding_degree": "sep_degree cuts sequences",
    },
}
"""Keys that are accepted and do not act, by dictionary, and why."""

NEEDS = {
    ("a_sync_configs", "max_merge_var_num"): "half_async",
    ("a_sync_configs", "local_optimizer"): "k_steps",
}
"""Keys that act only with another key of their dictionary."""
