"""`towpath relay`: publishing the outbox."""

import typer

from towpath import settings
from towpath.cli import health
from towpath.cli.options import Json

app = typer.Typer(name="relay", help="Publish the outbox to the broker.", no_args_is_help=True)


@app.command()
def run() -> None:
    """Run a relay until SIGTERM or Ctrl-C. Settings: TOWPATH_RELAY__…"""
    from towpath.relay.service import run as run_relay  # noqa: PLC0415  the engine is heavy

    run_relay(settings.load())


@app.command()
def check(live: health.Live = False, json: Json = False) -> None:
    """Ask the relay of this machine, at TOWPATH_RELAY__HEALTH_PORT, whether it is ready; exit 3 if not."""
    loaded = settings.load().relay
    health.check("relay", loaded.health_host, loaded.health_port, is_live=live, is_json=json)
