"""Words of older frameworks that a script types by habit, and what to write instead: one table for errors and docs."""

from __future__ import annotations

REPLACED: dict[str, str] = {
    # Fleet and its namespaces
    "Distributedstrategy": "fleet.DistributedStrategy",
    "main_program": "px.train_step(model, loss_fn, optimizer): the step is the program",
    "_origin_program": "px.train_step(model, loss_fn, optimizer): the step is the program",
    "default_main_program": "px.train_step(model, loss_fn, optimizer): the step is the program",
    "default_startup_program": "nothing: parameters are initialised when the module is built",
    "incubate": "from phalanx import fleet",
    "fluid": "from phalanx import fleet",
    "fleet_base": "from phalanx import fleet",
    "minimize": "loss.backward(); optimizer.step()",
    # static graph
    "enable_static": "strategy.graph = True",
    "disable_static": "strategy.graph = False",
    "static": "px.train_step(model, loss_fn, optimizer)",
    "Executor": "px.train_step(model, loss_fn, optimizer); out = step(batch)",
    "CUDAPlace": "torch.device('cuda', n); the launcher picks the device (--gpus)",
    "CPUPlace": "torch.device('cpu')",
    "set_device": "phalanx run --gpus 0,1 (the launcher picks the device)",
    "set_image_backend": "Pillow is the only image backend of phalanx.data",
    # twins in torch
    "Momentum": "torch.optim.SGD(..., momentum=0.9)",
    "L2Decay": "the optimizer's weight_decay=",
    "batch": "px.distribute(model, optimizer, dataset, global_batch=...)",
    "to_tensor": "torch.as_tensor",
    "clear_gradients": "optimizer.zero_grad()",
    "clear_grad": "optimizer.zero_grad()",
}
"""Old word -> what to write; `px` is `import phalanx as px`."""


def replacement(name: str) -> str | None:
    """Return `"'name' is not here: write ..."` for a word of an older framework, or None for any other."""
    instead = REPLACED.get(name)
    return f"'{name}' belongs to an older framework. Write instead: {instead}" if instead else None
