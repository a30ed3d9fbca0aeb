"""`shape_of`: parameter names, shapes and dtypes of a torch module, as the `ModelShape` of a Plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

from phalanx.comm.groups import Group
from phalanx.parallel.session import session
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.plan.value import Table

if TYPE_CHECKING:  # a job without tables does not wait for what they need
    from phalanx.ps.client.parameter import TableParameter
    from phalanx.ps.table.rules import EntryPolicy
    from phalanx.ps.table.update_rules import Rule


def is_module_held(tensor: Tensor) -> bool:
    """Return whether a layer holds one shard of this parameter on each rank (`param.is_distributed = True`)."""
    # torch has a method of that name, so only the value True counts.
    return getattr(tensor, "is_distributed", None) is True


def mark_held(param: Tensor, group: Group) -> None:
    """Mark a parameter as `is_distributed`, and remember over which ranks its layer holds it."""
    param.is_distributed = True  # type: ignore[assignment, method-assign]  # the users' own word for it
    session.shard_groups[param] = group


def held_over(param: Tensor) -> Group:
    """Return the ranks over which a layer holds a parameter; all, unless it was noted."""
    return session.shard_groups.get(param, None)  # type: ignore[no-any-return]


def note_stages(param: Tensor, group: Group) -> None:
    """Remember that the model of a parameter is split into stages, each of which one rank of the group holds."""
    session.stage_groups[param] = group


def stages_over(params: Iterable[Tensor]) -> tuple[Group, ...]:
    """Return the groups over whose ranks the models of these parameters are split into stages."""
    groups = session.stage_groups
    return tuple(dict.fromkeys(groups[param] for param in params if param in groups)) if groups else ()


def is_handle(param: Tensor) -> TypeGuard[TableParameter]:
    """Return whether a parameter stands for a table."""
    return getattr(param, "is_table", False)


def owner_of(name: str, model: nn.Module) -> nn.Module:
    """Return the module that has the parameter of this name."""
    return model.get_submodule(name.rpartition(".")[0])


def shape_of(model: nn.Module) -> ModelShape:
    """Return names, shapes and dtypes of a module's parameters, in registration order.

    A parameter shared by several layers appears once, under its first name.
    """
    return ModelShape(
        tuple(
            ParamShape(
                name=name,
                shape=(0, param.settings.dim) if is_handle(param) else tuple(param.shape),
                dtype=str(param.dtype).removeprefix("torch."),
                item_bytes=param.element_size(),
                trainable=param.requires_grad,
                is_distributed=is_module_held(param),
                table=_table(name, param) if is_handle(param) else None,
            )
            for name, param in model.named_parameters()
        )
    )


def _table(name: str, parameter: TableParameter) -> Table:
    """Return the table that a parameter stands for, named after its module where nobody named it."""
    module, settings = name.rpartition(".")[0], parameter.settings
    return Table(
        name=parameter.table or default_table_name(module),
        module=module,
        dim=settings.dim,
        optimizer=_words(settings.optimizer),
        entry=_words(settings.entry),
        dtype=settings.dtype,
    )


def default_table_name(module: str) -> str:
    """Return the name of the table of a module at this place in a model."""
    return module or "embedding"


def _words(value: Rule | EntryPolicy | None) -> str | None:
    """Return a rule or policy as a person would write it: `adagrad(lr=0.05)`."""
    if value is None:
        return None
    decided = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if getattr(value, f.name) != f.default}
    return f"{value.kind}({', '.join(f'{name}={setting}' for name, setting in decided.items())})"
