"""Migrations that this library does not know: the schema as newer versions of it would make it."""

import os
from pathlib import Path
from typing import Any, Literal

import pytest

from towpath.store import migrate

Step = Literal["additive", "contracting"]


def know(monkeypatch: pytest.MonkeyPatch, *steps: Step) -> None:
    """Let `migrate` know these migrations, too, as the library that brings them would."""
    config_of = migrate._config

    def with_more(schema: str) -> Any:
        config = config_of(schema)
        own = Path(str(config.get_main_option("script_location"))) / "versions"
        config.set_main_option(
            "version_locations",
            os.pathsep.join(map(str, (own, *(Path(__file__).parent / step for step in steps)))),
        )
        return config

    monkeypatch.setattr(migrate, "_config", with_more)
