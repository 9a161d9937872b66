"""`towpath relay`: publishing the outbox."""

import typer

from towpath import settings

app = typer.Typer(name="relay", help="Publish the outbox to the broker.", no_args_is_help=True)


@app.command()
def run() -> None:
    """Run a relay until SIGTERM or Ctrl-C. Settings: TOWPATH_RELAY__…"""
    from towpath.relay.service import run as run_relay  # noqa: PLC0415  the engine is heavy

    run_relay(settings.load())
