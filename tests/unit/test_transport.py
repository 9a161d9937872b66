"""What leaves this machine, and how a Postgres URL is made to verify."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from towpath.errors import ConfigurationError, SettingsError
from towpath.telemetry.setup import setup
from towpath.transport import is_loopback, postgres_hosts, postgres_url_with_tls


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("PGSSLMODE", "PGSSLROOTCERT", "PGHOST", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    authorities = tmp_path / "authorities.pem"
    authorities.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities))
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_what_stays_on_this_machine() -> None:
    for host in ("localhost", "db.localhost", "::1", "127.8.8.8", "/var/run/postgresql"):
        assert is_loopback(host)
    for host in ("10.0.0.1", "localhost.example.com", "::2", "", "postgres"):
        assert not is_loopback(host)


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://u:p@db.internal:5432/x", ["db.internal"]),
        ("postgresql://u:p%40x@[::1]:5432/x", ["::1"]),
        ("postgresql://a:1,b/x", ["a", "b"]),
        ("postgresql:///x?host=/tmp", ["/tmp"]),
        ("postgresql://u@%2Ftmp/x", ["/tmp"]),
        ("postgresql:///x", ["localhost"]),
    ],
)
def test_the_hosts_of_a_url(url: str, hosts: list[str]) -> None:
    assert postgres_hosts(url) == hosts


def parameters(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(postgres_url_with_tls(url)).query).items()}


def test_certificates_of_another_machine_are_verified_by_default(
    no_variables: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """X4"""
    system = str(tmp_path / "authorities.pem")
    for url in ("postgresql://u:p@db/x", "postgresql://u:p@localhost,db/x"):
        assert parameters(url) == {"sslmode": "verify-full", "sslrootcert": system}
    assert parameters("postgresql://u@db/x?sslrootcert=%2Fmy+own.pem") == {
        "sslmode": "verify-full",
        "sslrootcert": "/my own.pem",
    }
    assert parameters("postgresql://u@db/x?sslrootcert=system")["sslrootcert"] == system
    no_variables.setenv("PGSSLROOTCERT", "/mine.pem")
    assert parameters("postgresql://u:p@db/x") == {"sslmode": "verify-full"}


@pytest.mark.parametrize("mode", ["require", "disable", "verify-ca"])
def test_a_mode_that_was_chosen_stays(no_variables: pytest.MonkeyPatch, mode: str) -> None:
    """X4: opted in by saying so."""
    assert parameters(f"postgresql://u:p@db/x?sslmode={mode}")["sslmode"] == mode
    no_variables.setenv("PGSSLMODE", mode)
    assert "sslmode" not in parameters("postgresql://u:p@db/x")


def test_a_url_of_this_machine_is_left_alone() -> None:
    for url in ("postgresql://u:p@127.0.0.1:5432/x?sslmode=prefer&a=b", "postgresql:///x?host=/tmp"):
        assert postgres_url_with_tls(url) == url


def test_a_mode_that_may_fall_back_to_plaintext_is_refused() -> None:
    """X4"""
    with pytest.raises(ConfigurationError, match=r"to db without TLS \(sslmode=prefer\)"):
        postgres_url_with_tls("postgresql://u:p@db/x?sslmode=prefer")


@pytest.mark.parametrize(
    ("endpoint", "headers"),
    [("http://otel.example.com:4318", "api-key=s3cr3t"), ("http://u:s3cr3t@otel.example.com", "")],
)
def test_the_key_of_a_telemetry_backend_does_not_travel_in_the_clear(
    no_variables: pytest.MonkeyPatch, endpoint: str, headers: str
) -> None:
    """X4, X3"""
    no_variables.setenv("OTEL_TRACES_EXPORTER", "otlp")
    no_variables.setenv("OTEL_METRICS_EXPORTER", "none")
    no_variables.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    no_variables.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)

    with pytest.raises(SettingsError, match="without TLS: use https://") as caught:
        setup("orders")

    assert "s3cr3t" not in str(caught.value)
