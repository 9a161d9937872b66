"""The version of the library after this one: it knows one more migration, and cannot do without it."""

import shutil
from pathlib import Path
from typing import Final

import towpath

VERSION: Final = "99.0"

_MIGRATION: Final = Path(__file__).parent / "additive" / "0002_more.py"

# With the columns that its migration adds it says which members, windows and started events are its own.
# It waits for tables as long as a busy machine needs.
_CHANGES: Final = (
    ("store/installed.py", "SCHEMA_VERSION: Final = 1", "SCHEMA_VERSION: Final = 2"),
    ("store/migrate.py", "_PATIENCE_SECONDS: Final = 60.0", "_PATIENCE_SECONDS: Final = 600.0"),
    ("store/sql/work.sql", "lease_until, types, version)", "lease_until, types, version, note)"),
    ("store/sql/work.sql", "$5, $6)\n\n-- name: beat", "$5, $6, 'next')\n\n-- name: beat"),
    ("store/sql/work.sql", "token, started_at)\nselect", "token, started_at, note)\nselect"),
    ("store/sql/work.sql", "$10, towpath.clock()\n  from", "$10, towpath.clock(), 'next'\n  from"),
    ("store/sql/relay.sql", "snapshot_to)\n  select", "snapshot_to, note)\n  select"),
    ("store/sql/relay.sql", "$6::text::pg_snapshot\n  where", "$6::text::pg_snapshot, 'next'\n  where"),
)


def build(directory: Path) -> str:
    """Make it in an empty directory, and say which: a process with that first on its PYTHONPATH runs it."""
    package = directory / "towpath"
    shutil.copytree(Path(towpath.__file__).parent, package)
    shutil.copy(_MIGRATION, package / "store" / "migrations" / "versions")
    for name, old, new in _CHANGES:
        text = (package / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, old
        (package / name).write_text(text.replace(old, new), encoding="utf-8")
    metadata = directory / f"towpath-{VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: towpath\nVersion: {VERSION}\n", encoding="utf-8")
    return str(directory)
