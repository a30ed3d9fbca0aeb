"""The command `phalanx serve-table`: answer rows of tables over HTTP."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import Any

import click

from phalanx.cli.output import talk
from phalanx.errors import ConfigError
from phalanx.i18n import tr
from phalanx.launch.cli.flag_types import EITHER_SPELLING

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(
    context_settings=EITHER_SPELLING,
    epilog="\b\nExample:\n  phalanx serve-table saved --port 8471\n  phalanx serve-table --follow state --port 8471\n"
    "  curl localhost:8471/v1/tables/item/rows -d '{\"ids\": [7, 42]}'",
)
@click.argument("directory", type=_FOLDER)
@click.option("--host", default="127.0.0.1", show_default=True, help="Name or address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0, the default: any free port.")
@click.option("--certificate", type=_FILE, help="TLS certificate (PEM). Required unless --host is loopback.")
@click.option("--key", type=_FILE, help="Key of the certificate, if it is in a separate file.")
@click.option(
    "--token-file", type=_FILE, help="File with the token that requests bring. Required unless --host is loopback."
)
@click.option(
    "--follow", is_flag=True, help="DIRECTORY is the --server-dir or --log-dir of a job: serve rows as it trains."
)
def command(directory: Path, token_file: Path | None, follow: bool, **address: Any) -> None:
    """Serve the rows of the snapshot in DIRECTORY over HTTP, and newer ones that are saved there."""
    from phalanx.cluster.network import is_loopback
    from phalanx.jobs.api.serve import ListenOptions, address_of, bind, serve
    from phalanx.ps.serving.app import make_table_app
    from phalanx.ps.serving.servers_replica import ServersReplica
    from phalanx.ps.serving.snapshot_replica import SnapshotReplica
    from phalanx.ps.serving.view import TableReplica

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    listen = ListenOptions(**address)
    token = _read_token(token_file)
    with bind(listen) as bound:
        if token is None and not is_loopback(str(bound.getsockname()[0])):
            raise ConfigError(
                f"--host {listen.host} can be reached from other machines, and no token protects the tables. Give "
                "--token-file FILE, or listen on 127.0.0.1 and use a tunnel (ssh -L)."
            )
        for number in (signal.SIGINT, signal.SIGTERM):
            # uvicorn stops on a signal, and then sends it again to the handler before its own.
            signal.signal(number, lambda *_: sys.exit(0))
        replica: TableReplica = ServersReplica(directory) if follow else SnapshotReplica(directory)
        try:
            bound.listen()  # a client that is faster than the server waits instead of being refused
            talk(tr("Tables at {address}/v1/tables. Ctrl-C ends the server.", address=address_of(bound, listen)))
            serve(make_table_app(replica.view, token), bound, listen)
        finally:
            replica.close()


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ConfigError(f"--token-file {path} is empty. Write the token into it that requests are to bring.")
    return token
