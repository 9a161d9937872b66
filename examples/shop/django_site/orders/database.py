"""Django's database as towpath's settings know one."""

import os
from urllib.parse import quote

from django.conf import settings


def url() -> str:
    """Of the default database; while Django's tests run it is the test database."""
    given = settings.DATABASES["default"]
    login = ":".join(quote(part, safe="") for part in (given["USER"], given["PASSWORD"]) if part)
    server = ":".join(str(part) for part in (given["HOST"], given["PORT"]) if part)
    return f"postgresql://{login}@{server}/{quote(given['NAME'])}"


def use() -> None:
    """Let the command line of this process work there, unless told otherwise."""
    os.environ.setdefault("TOWPATH_DATABASE_URL", url())
