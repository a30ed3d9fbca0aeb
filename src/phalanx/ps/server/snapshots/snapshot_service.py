"""`SnapshotService`: the server's side of a distributed snapshot: freeze, begin to write, resume; and loading."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.ps.server.clocks import WAIT_REPORT_S
from phalanx.ps.server.service import Service
from phalanx.ps.server.snapshots.snapshot_writer import SnapshotWriter
from phalanx.ps.snapshot.participant import SnapshotParticipant
from phalanx.ps.snapshot.read import SnapshotSource
from phalanx.ps.snapshot.write import WriteRequest
from phalanx.ps.wire.message import RpcReply, RpcRequest

_REMEMBERED = 4

_LAUNCHER = "the launcher, which has other servers take the tables"


class SnapshotService:
    """Answers the operations of snapshots for a service.

    Args:
        service: The service whose tables are saved and loaded.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.participant = SnapshotParticipant(service.state.tables.tables, service.state.shards, service.state.server)
        self._writers: dict[str, SnapshotWriter] = {}
        self._holder, self._released = "", threading.Condition()
        """Token of the launcher's freeze, with which it gives the tables to other servers; saves wait for its end."""

        service.state.loaded = lambda source, name: self.participant.remember_load(source, [name])
        for op in (self.freeze, self.snapshot, self.resume, self.saved, self.state, self.load, self.leases):
            service.add_operation(op.__name__, op)

    def freeze(self, request: RpcRequest) -> RpcReply:
        """Hold changes back, but those below `steps`; with `wait` until those came. Returns how far each worker is."""
        service, meta = self._service, request.meta
        worker = service.engine.worker_of(request.client)
        steps: Sequence[int] = meta.get("steps", ())
        self._freeze(request, steps)
        if service.state.clocks is not None and meta.get("wait"):
            service.state.clocks.wait_steps(steps, meta["seconds"])
        # A push is counted before the step that it completes is in the tables: only between changes do the two agree.
        with service.write_freeze.while_frozen(meta["token"]):
            clocks = service.state.clocks
            return RpcReply(
                {
                    "steps": clocks.reached if clocks else [],
                    "mode": clocks.mode if clocks else None,
                    "worker": worker,
                    "pushed": clocks.applied_steps if clocks else [],
                    "fulls": self.participant.fulls,
                    "specs": [spec.to_json() for spec in service.state.tables.specs.values()],
                    "leases": service.state.leases.to_json(),
                }
            )

    def snapshot(self, request: RpcRequest) -> RpcReply:
        """Begin to write this server's part."""
        service, save = self._service, request.meta["save"]
        with service.write_freeze.while_frozen(request.meta["token"]):
            write_request = self.participant.write_request(request.meta)
            self._writers[save] = self.begin(write_request)
            while len(self._writers) > _REMEMBERED:
                self._writers.pop(next(iter(self._writers))).stop()
        return RpcReply()

    def begin(self, request: WriteRequest) -> SnapshotWriter:
        """Begin to write the tables as they are now. Nothing may change them meanwhile."""
        return SnapshotWriter(request, self._service.state.tables.tables)

    def resume(self, request: RpcRequest) -> RpcReply:
        """Let changes continue."""
        with self._released:
            if self._holder == request.meta["token"]:
                self._holder = ""
                self._released.notify_all()
        self._service.write_freeze.resume(request.meta["token"])
        return RpcReply()

    def _freeze(self, request: RpcRequest, steps: Sequence[int]) -> None:
        token, is_hand_over = request.meta["token"], bool(request.meta.get("hold"))
        holder = _LAUNCHER if is_hand_over else f"{request.peer}, which begins a snapshot"
        with self._released:
            while self._holder not in ("", token) and not self._service.stopped.is_set():
                request.report_wait(_LAUNCHER, True)
                self._released.wait(WAIT_REPORT_S)
            self._service.write_freeze.freeze(token, request.meta["seconds"], steps, holder)
            if is_hand_over:
                self._holder = token

    def saved(self, request: RpcRequest) -> RpcReply:
        """Say whether this server's part is written, and what; waits a little for it."""
        save = request.meta["save"]
        if save not in self._writers:
            raise ConfigError(f"This server writes no snapshot {save}: it was started again since. Save again.")
        writer = self._writers[save]
        if not writer.wait(request.meta["wait_s"]):
            return RpcReply({"done": False})
        return RpcReply({"done": True, "result": writer.result()})

    def state(self, request: RpcRequest) -> RpcReply:
        """Return what is not in the tables, inside a freeze."""
        with self._service.write_freeze.while_frozen(request.meta["token"]):
            state, unanswered = self._service.state.to_json(), self._service.unanswered
            return RpcReply({"state": {**state, "saving": self.to_json(), "unanswered": unanswered}})

    def load(self, request: RpcRequest) -> RpcReply:
        """Replace rows by those of a snapshot, now and in tables declared later."""
        service, names = self._service, request.meta.get("names")
        source = SnapshotSource(Path(request.meta["directory"]), names)
        with service.load_turn.take(request):
            specs = [spec for name, spec in service.state.tables.specs.items() if name in source.names]
            tables = service.state.read_tables(source, specs)
            with service.write_freeze.change(report_wait=request.report_wait):
                for table in tables:
                    service.state.put_table(table)
                self.participant.remember_load(source, [spec.name for spec in specs])
                service.state.sources.append(source)
                if names is None and service.state.server == 0:
                    service.state.leases.restore(source.snapshot.manifest.leases or {}, holders=False)
                service.mark_unlogged()
            service.write_unlogged(request)
        return RpcReply({"rows": {spec.name: service.state.tables.tables[spec.name].rows for spec in specs}})

    def leases(self, request: RpcRequest) -> RpcReply:
        """Return which files were read how far."""
        return RpcReply({"leases": self._service.state.leases.to_json()})

    def add_source(self, directory: Path, names: Sequence[str] | None) -> None:
        """Fill tables that are declared from now on with what a snapshot has of them."""
        self._service.state.sources.append(SnapshotSource(directory, names))

    def stop(self) -> None:
        """Give up what is being written: nobody is left to ask for it."""
        for writer in list(self._writers.values()):
            writer.stop()
            writer.wait()

    def to_json(self) -> dict[str, Any]:
        """Return what must outlive the process."""
        sources = [[str(s.snapshot.directory.absolute()), sorted(s.names)] for s in self._service.state.sources]
        return {"fulls": self.participant.to_json(), "sources": sources}

    def restore(self, value: Mapping[str, Any]) -> None:
        """Take over what `to_json` returned, the tables being filled."""
        self.participant.restore(value["fulls"])
        for directory, names in value["sources"]:
            self.add_source(Path(directory), names)
