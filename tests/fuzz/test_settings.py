"""Whatever the environment holds, settings are right or refused in lines that show no secret."""

import math
import os
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from towpath.backoff import parse_duration
from towpath.errors import SettingsError
from towpath.relay.provenance import home_of
from towpath.settings import FILE_VARIABLE, PREFIX, load, variables
from towpath.settings.types import parse_size

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
NUMBERS = st.sampled_from(["0", "1", "-1", "1e3", "00", "9" * 30, "٣", "0.5", "nan", "inf", "+5"])
UNITS = st.sampled_from(
    ["", "ms", "s", "m", "h", "d", "MB", "KiB", "kb", "GIB", " MB", "s s", "\N{KELVIN SIGN}B"]
)
VALUES = st.one_of(
    ANY_TEXT,
    st.builds(str.__add__, NUMBERS, UNITS),
    st.sampled_from(
        ["true", "[]", "{}", '{"a": 1}', "null", "[1", "kafka://a:9092", "postgresql://h/d", "/etc/passwd"]
    ),
)
SECRET = "hunter2-canary"
DURATION_PARTS = st.lists(
    st.tuples(st.integers(0, 999), st.sampled_from(["ms", "s", "m", "h", "d"])), min_size=1, max_size=5
)
SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


@given(parts=DURATION_PARTS, padding=st.sampled_from(["", " ", "\t"]))
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[int, str]], padding: str) -> None:
    text = padding + "".join(f"{number}{unit}" for number, unit in parts) + padding
    expected = sum(number * SECONDS[unit] for number, unit in parts)
    assert math.isclose(parse_duration(text).total_seconds(), expected, abs_tol=1e-6)


@given(text=VALUES)
@example("٣s")
@example("1\N{FULLWIDTH DIGIT ONE}s")
def test_a_duration_is_written_in_ascii_or_refused(text: str) -> None:
    try:
        found = parse_duration(text)
    except ValueError:
        return
    assert text.strip().isascii()
    assert parse_duration(f"{found // parse_duration('1ms')}ms") <= found


@given(
    number=st.integers(0, 10**15 - 1), unit=st.sampled_from(["", "B", "kB", "KiB", "MB", "mib", "GB", "GiB"])
)
def test_a_size_is_its_number_times_its_unit(number: int, unit: str) -> None:
    size = parse_size(f" {number} {unit}")
    assert size == number * parse_size(f"1{unit}")
    assert parse_size(str(size)) == size if size < 10**15 else True


@given(text=VALUES)
@example("٣MB")
@example("8\N{KELVIN SIGN}B")
def test_a_size_is_written_in_ascii_or_refused(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError:
        return
    assert text.strip().isascii()
    assert size >= 0


@given(
    given=st.dictionaries(st.sampled_from(sorted({*variables(), FILE_VARIABLE})), VALUES, max_size=4),
    secret_in=st.sampled_from(["DATABASE_URL", "BROKER_URL"]),
    scheme=st.sampled_from(["", "postgresql", "kafka", "http"]),
)
def test_any_environment_is_settings_or_one_line_of_refusal(
    given: dict[str, str], secret_in: str, scheme: str
) -> None:
    """O2, X3"""
    environment = {f"{PREFIX}DATABASE_URL": "postgresql://u:p@h/d"} | given
    environment[PREFIX + secret_in] = f"{scheme}://user:{SECRET}@host name/x"
    own = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with patch.dict(os.environ, own | environment, clear=True):
        try:
            shown = repr(load())
        except SettingsError as error:
            shown = str(error)
            assert PREFIX in shown
    assert SECRET not in shown
    assert "\n" not in shown


@given(
    user=ANY_TEXT,
    host=st.sampled_from(["h", "h.example", "[::1]", "a,b", "a:1,b:2", "h:0", "h:99999", "h:٣", "h:", ""])
    | ANY_TEXT,
    name=ANY_TEXT,
)
def test_an_accepted_database_url_names_its_home_without_credentials(user: str, host: str, name: str) -> None:
    """X3, R27"""
    url = f"postgresql://{user}:{SECRET}@{host}/{name}"
    try:
        load(database_url=url)
    except SettingsError:
        return
    home = home_of(url)
    assert SECRET not in home
    ports = [each.rpartition(":")[2] for each in home.partition("/")[0].split(",")]
    assert all(port.isascii() and port.isdigit() and int(port) <= 65535 for port in ports), home
