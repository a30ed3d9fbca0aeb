"""`data_handler`: answers the pulls and pushes that the native core decoded by `Service.handle`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.errors import ConfigError
from phalanx.ps.server.service import Service
from phalanx.ps.stores.base import Keys, Rows
from phalanx.ps.stores.update import COLUMNS, KINDS
from phalanx.ps.table.placement import table_salt
from phalanx.ps.wire.data_frame import DataStatus
from phalanx.ps.wire.frame import Array
from phalanx.ps.wire.message import RpcReply, RpcRequest
from phalanx.ps.wire.segments import ReplyBuffer

if TYPE_CHECKING:
    from phalanx._core import DataHandler

_Answer = tuple[int, int, int]
"""Status, number and dropped gradients of a reply."""


def data_handler(service: Service) -> DataHandler:
    """Return what answers pulls and pushes of a service's tables."""
    from phalanx._core import PythonHandler

    return PythonHandler(_Requests(service).answer)


class _Rows(ReplyBuffer):
    """Memory of a reply, table by table."""

    def __init__(self, rows: Callable[[int, int], Rows]) -> None:
        super().__init__(None)
        self._rows = rows

    def empty(self, shape: Any, dtype: Any) -> Array:
        return self._rows(*shape)


class _Requests:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._names: dict[int, str] = {}

    def answer(
        self,
        is_push: bool,
        client: int,
        seq: int,
        step: int,
        weight: float,
        keep: bool,
        pushes: Sequence[tuple[Any, ...]],
        pulls: Sequence[tuple[int, Keys]],
        rows: Callable[[int, int], Rows],
        report_wait: Callable[[str, bool], None],
    ) -> _Answer:
        """Answer a request. See `csrc/server_request.h`."""
        described, arrays = [], list[Array]()
        for push in pushes:
            change, of_push = self._describe(*push)
            described.append(change)
            arrays += of_push
        tables = [(self._name(table), len(keys)) for table, keys in pulls]
        arrays += [keys for _, keys in pulls]
        op, meta = "pull", {"step": step, "tables": tables, "keep": keep}
        if is_push:
            op, meta = "push", {"step": step, "weight": weight, "changes": described, "then": tables}
        request = RpcRequest(op, meta, arrays, client, seq, "", _Rows(rows), report_wait)
        return _answer_of(self._service.handle(request))

    def _describe(
        self,
        table: int,
        kind: int,
        pull: int,
        keys: Keys | None,
        values: Array,
        rows: int,
        lr: float | None,
        *columns: Array | None,
    ) -> tuple[dict[str, Any], list[Array]]:
        name = self._name(table)
        has = {column: True for column, array in zip(COLUMNS, columns, strict=True) if array is not None}
        change = {"table": name, "kind": KINDS[kind], "lr": lr, "pull": pull or None, **has}
        dim = values.size // rows if rows else self._service.state.tables.tables[name].spec.dim
        shaped: list[Array] = [values.reshape(rows, dim)]
        of_push = shaped if keys is None else [keys, *shaped]
        return change, of_push + [array for array in columns if array is not None]

    def _name(self, table: int) -> str:
        if table not in self._names:
            self._names = {table_salt(name): name for name in list(self._service.state.tables.tables)}
        if table not in self._names:
            raise ConfigError(
                f"There is no table of number {table:#x}; tables: {sorted(self._names.values())}. Declare it first."
            )
        return self._names[table]


def _answer_of(reply: RpcReply) -> _Answer:
    meta = reply.meta
    if "need_push" in meta:
        return DataStatus.NEED_PUSH, meta["need_push"], 0
    if "need_keys" in meta:
        return DataStatus.NEED_KEYS, 0, 0
    return DataStatus.AGAIN if "again" in meta else DataStatus.DONE, meta.get("pull_id", 0), meta.get("dropped", 0)
