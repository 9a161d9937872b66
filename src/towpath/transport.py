"""Which connections leave this machine, and how they are protected: TLS with a verified certificate."""

import ipaddress
import os
import ssl
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, quote, unquote, urlsplit, urlunsplit

from towpath.errors import ConfigurationError, SettingsError

_DOWNGRADING: Final = ("prefer", "allow")
_OWN_ROOTS: Final = "~/.postgresql/root.crt"


def is_loopback(host: str) -> bool:
    """Whether a host name, an address or the directory of a socket stays on this machine."""
    if host == "localhost" or host.endswith(".localhost") or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def postgres_hosts(url: str) -> list[str]:
    """The hosts of a Postgres URL, without ports."""
    parts = urlsplit(url)
    listed = parts.netloc.rpartition("@")[2] or ",".join(parse_qs(parts.query).get("host", []))
    hosts = (listed or os.environ.get("PGHOST") or "localhost").split(",")
    return [_host(unquote(host)) for host in hosts]


def _host(address: str) -> str:
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address if address.startswith("/") or address.count(":") > 1 else address.partition(":")[0]


def postgres_url_with_tls(url: str) -> str:
    """A Postgres URL as a driver takes it: to another machine it verifies, unless `sslmode` is given.

    `PGSSLMODE` counts as given. Certificates are verified by `sslrootcert`, else by the system's
    authorities. Raises ConfigurationError for a mode that may fall back to sending in the clear.
    """
    remote = [host for host in postgres_hosts(url) if not is_loopback(host)]
    if not remote:
        return url
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    mode = query.get("sslmode") or os.environ.get("PGSSLMODE") or ""
    if mode in _DOWNGRADING:
        raise ConfigurationError(
            f"may send a password to {remote[0]} without TLS (sslmode={mode}): leave sslmode out, which "
            "verifies, or say sslmode=disable where the network between is trusted"
        )
    if not mode:
        query["sslmode"] = mode = "verify-full"
    if mode.startswith("verify-"):
        query |= _roots(query.get("sslrootcert"))
    return urlunsplit(
        parts._replace(query="&".join(f"{name}={quote(value)}" for name, value in query.items()))
    )


def _roots(given: str | None) -> dict[str, str]:
    """The system's authorities, where no others are given: drivers do not look there by themselves."""
    has_own = os.environ.get("PGSSLROOTCERT") or Path(_OWN_ROOTS).expanduser().exists()
    system = ssl.get_default_verify_paths().cafile
    if not system or (given != "system" and (given or has_own)):
        return {}
    return {"sslrootcert": system}


def refuse_plaintext(hosts: list[str], secret: str, fix: str) -> None:
    """Raise SettingsError where a secret would leave this machine without TLS."""
    remote = [host for host in hosts if not is_loopback(host)]
    if remote:
        raise SettingsError(f"refusing to send {secret} to {remote[0]} without TLS: {fix}")
