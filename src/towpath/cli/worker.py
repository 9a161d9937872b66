"""`towpath worker`: consuming for one group."""

from typing import Annotated, TypeAlias

import typer

from towpath import settings
from towpath.cli import groups, health
from towpath.cli.exits import SAYS_NO, Stop
from towpath.cli.offsets import offsets
from towpath.cli.options import Json
from towpath.cli.output import as_json, clean

app = typer.Typer(name="worker", help="Consume for one group.", no_args_is_help=True)

app.command()(groups.status)
app.command()(groups.pause)
app.command()(groups.resume)
app.command()(offsets)

Target: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODULE:APP", help="For example billing.consumer:app.")
]


@app.command()
def run(target: Target) -> None:
    """Run one member of a consumer group until SIGTERM or Ctrl-C. Settings: TOWPATH_WORKER__…

    towpath worker run billing.consumer:app
    """
    from towpath.consumer import service  # noqa: PLC0415  the engine is heavy

    loaded = settings.load()
    service.run(service.load_app(target), loaded)


@app.command()
def check(live: health.Live = False, json: Json = False) -> None:
    """Ask the worker of this machine, at TOWPATH_WORKER__HEALTH_PORT, whether it is ready; exit 3 if not.

    towpath worker check
    """
    loaded = settings.load().worker
    health.check("worker", loaded.health_host, loaded.health_port, is_live=live, is_json=json)


@app.command()
def validate(target: Target, json: Json = False) -> None:
    """Say everything that is wrong with an app and can be known without running it; exit 3 if anything is.

    towpath worker validate billing.consumer:app
    """
    from towpath.consumer import service, slots  # noqa: PLC0415  the engine is heavy

    group = service.load_app(target)
    problems = [*group.problems(), *slots.setting_problems(group.handlers, settings.load_offline().worker)]
    if json:
        handlers = {type_: handler.name for type_, handler in sorted(group.handlers.items())}
        as_json(
            {
                "ok": not problems,
                "group": group.name,
                "ordering": group.ordering,
                "destinations": list(group.destinations),
                "handlers": handlers,
                "problems": problems,
            }
        )
    else:
        for problem in problems:
            print(clean(problem))
        if not problems:
            print(f"group {group.name}: {len(group.handlers)} handlers, all well")
    if problems:
        raise Stop(SAYS_NO)
