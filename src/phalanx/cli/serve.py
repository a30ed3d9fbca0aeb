"""The commands `phalanx serve` and `phalanx ui`: run the HTTP API, the web console and the job controller."""

from __future__ import annotations

import secrets
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.output import talk
from phalanx.i18n import tr
from phalanx.jobs import paths
from phalanx.launch.cli.flag_types import EITHER_SPELLING

if TYPE_CHECKING:
    from phalanx.jobs.backend_registry import Backends
    from phalanx.jobs.store import JobDatabase

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SIGNED_IN_H = 12


def _place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--key", type=_FILE, help="Key of the certificate, if it is in a separate file."),
        click.option("--certificate", type=_FILE, help="TLS certificate (PEM). Required unless --host is loopback."),
        click.option("--port", type=click.IntRange(0, 65535), help="0: any free port. Default: 8470."),
        click.option("--host", default="127.0.0.1", show_default=True, help="Name or address to listen on."),
    ):
        command = option(command)
    return command


@click.command(context_settings=EITHER_SPELLING, epilog="\b\nExample:\n  phalanx serve --port 8080")
@_place_options
def serve(**options: Any) -> None:
    """Run the job server and web console; sign in with a token from `phalanx token add`."""
    _serve(options, open_browser=None)


@click.command(context_settings=EITHER_SPELLING, epilog="\b\nExample:\n  phalanx ui --no-browser")
@_place_options
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def ui(no_browser: bool, **options: Any) -> None:
    """Run the job server and open the web console in a browser; prints a token to sign in with."""
    _serve(options, open_browser=(lambda _: None) if no_browser else webbrowser.open)


def _serve(options: dict[str, Any], *, open_browser: Callable[[str], object] | None) -> None:
    from phalanx.jobs.api.app import make_app
    from phalanx.jobs.api.serve import PORT, ListenOptions, address_of, bind
    from phalanx.jobs.api.serve import serve as serve_app
    from phalanx.jobs.backend_registry import Backends
    from phalanx.jobs.connect import local_actor
    from phalanx.jobs.protocol import Jobs
    from phalanx.jobs.service.service import JobService
    from phalanx.jobs.store import JobDatabase
    from phalanx.ui.console import add_console

    options["port"] = PORT if options["port"] is None else options["port"]
    listen, home, backends = ListenOptions(**options), paths.home(), Backends()
    with ExitStack() as stack:
        bound = stack.enter_context(bind(listen))
        store = stack.enter_context(JobDatabase(None, home))

        def authenticate(token: str) -> Jobs:
            return JobService(store, backends, store.tokens.actor_of(token), wake=lambda _: None)

        stack.enter_context(_run_controller(store, backends, home))
        app = make_app(authenticate)
        add_console(app)
        address = address_of(bound, listen)
        bound.listen()  # whoever reads the address is faster than the server: it waits instead of being refused
        talk(tr("Jobs and console at {address}/ui. Ctrl-C ends the server; jobs keep running.", address=address))
        if open_browser is not None:
            new_token = store.tokens.create(
                f"ui-{secrets.token_hex(4)}", local_actor(home), lasts_s=_SIGNED_IN_H * 3600
            )
            talk(tr("Sign in with this token, good for {hours} h:", hours=_SIGNED_IN_H))
            click.echo(new_token.text)
            open_browser(f"{address}/ui/")
        serve_app(app, bound, listen)


@contextmanager
def _run_controller(store: JobDatabase, backends: Backends, home: Path) -> Iterator[None]:
    """Run the job controller in a thread of this process; it waits while another one runs."""
    from phalanx.jobs.backends.local import this_machine
    from phalanx.jobs.control.controller import JobController, run_controller

    stopped = threading.Event()
    controller = JobController(store, backends, home, machine=this_machine())
    thread = threading.Thread(
        target=run_controller, args=(home, controller, stopped), kwargs={"until_idle": False}, name="controller"
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
