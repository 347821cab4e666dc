"""The command `serve`: the page to draw on, and the HTTP interface."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.options import DeviceOption
from fastweights.utils.console import say
from fastweights.utils.errors import UserError

NEEDED = ("fastapi", "uvicorn", "python_multipart")


def serve(
    classifier: Annotated[
        Path | None, typer.Argument(help="A classifier that `learn` made, to start with: icons.fw, say.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="127.0.0.1 is for this machine only; 0.0.0.0 for everybody who can reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")] = 8321,
    data: Annotated[
        Path | None, typer.Option(help="The database that memories are kept in. (default: with the user's data)")
    ] = None,
    model: Annotated[str, typer.Option(help="The model of the first memory: drawings, photos.")] = "drawings",
    encoder: Annotated[
        str | None,
        typer.Option(help="What turns pictures or texts into vectors: my_file.py:function, as in `learn`."),
    ] = None,
    room: Annotated[int, typer.Option(min=1, help="Megabytes that the database may take.")] = 1000,
    token: Annotated[
        str, typer.Option(envvar="FASTWEIGHTS_TOKEN", help="Answer only those who send this as a bearer token.")
    ] = "",
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="The origin of another page that may ask: https://example.org.")
    ] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="A name under which others know this machine.")] = None,
    device: DeviceOption = "cpu",
) -> None:
    """Teach it in the browser: a page to draw and show, and an HTTP interface. Ctrl-C stops it; nothing is lost."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UserError(f"{', '.join(missing)} is missing; pip install 'fastweights[serve]'.")
    from fastweights.classifier.encoders import encoder_of
    from fastweights.server.errors import Refusal  # deferred: needs the extra `serve`
    from fastweights.server.guard import Access
    from fastweights.server.limits import Limits
    from fastweights.server.running import Serving, default_store, have_the_process, listening

    access = Access(token, tuple(allow_origin or ()), tuple(allow_host or ()))
    path = data or default_store()
    how: dict[str, Any] = {"access": access, "limits": Limits(store=room * 1_000_000), "device": device}
    how["encoder"] = None if encoder is None else encoder_of(encoder)
    have_the_process()
    try:
        serving = Serving(path, listening(host, port), file=classifier, model=model, **how)
    except Refusal as refusal:
        raise UserError(f"{classifier}: {refusal}" if classifier else str(refusal)) from None
    say(f"Teach it here: {serving.address}/#{serving.memory}")
    say(f"For programs:  {serving.address}/v1 (described in {serving.address}/api.html)")
    say(f"All is kept in {path}. Ctrl-C stops.")
    serving.run()
    say("Stopped; nothing is lost.")
