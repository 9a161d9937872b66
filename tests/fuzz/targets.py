"""What is fuzzed: a property for any bytes. Inputs worth keeping are in `corpus/`, a literal in each line."""

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pamqp import decode
from pamqp.exceptions import PAMQPException

from tests.fuzz import test_arguments as arguments
from tests.fuzz import test_settings as settings
from tests.fuzz import test_wire as wire
from tests.property import test_messages as messages
from towpath.settings import FILE_VARIABLE, variables

CORPUS: Final = Path(__file__).parent / "corpus"
_NAMES: Final = {*variables(), FILE_VARIABLE}


def corpus_of(target: str) -> list[bytes]:
    """The inputs that are kept for a target."""
    path = CORPUS / f"{target}.txt"
    return [ast.literal_eval(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(target: str, inputs: set[bytes]) -> None:
    """Make these the ones that are kept."""
    CORPUS.mkdir(exist_ok=True)
    lines = sorted((repr(data) for data in inputs), key=lambda line: (len(line), line))
    (CORPUS / f"{target}.txt").write_text("".join(f"{line}\n" for line in lines))


def _property(test: Any) -> Callable[..., None]:
    """What hypothesis calls with its examples."""
    inner: Callable[..., None] = test.hypothesis.inner_test
    return inner


def _payload(data: bytes) -> None:
    for cls in messages.SHAPES:
        _property(messages.test_any_bytes_are_a_payload_or_a_decode_error)(cls, data)


def _headers(data: bytes) -> None:
    """As a row of the outbox or of a task has them."""
    _property(messages.test_any_text_is_headers_or_a_decode_error)(data.decode("utf-8", "replace"))


def _table(data: bytes) -> None:
    """As RabbitMQ sends headers."""
    try:
        _, table = decode.field_table(data)
    except (PAMQPException, ValueError, IndexError, OverflowError):  # the connection's business
        return
    _property(wire.test_any_table_is_headers_that_survive_the_way_back)(table)
    _property(wire.test_any_table_tells_of_a_death_in_known_words)(table)


def _settings(data: bytes) -> None:
    """Lines of an environment."""
    pairs = (line.split("=", 1) for line in data.decode("utf-8", "ignore").replace("\0", "").splitlines())
    given = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[0] in _NAMES}
    _property(settings.test_any_environment_is_settings_or_one_line_of_refusal)(given, "BROKER_URL", "kafka")


def _argument(data: bytes) -> None:
    """One word of a command line, also one that is no UTF-8."""
    value = data.decode("utf-8", "surrogateescape")
    _property(arguments.test_any_text_is_an_id_or_a_usage_error_of_one_line)(value)
    _property(arguments.test_any_text_is_an_aware_instant_or_a_usage_error)(value)
    _property(arguments.test_text_is_passed_on_unchanged_or_refused)(value, 40)
    _property(settings.test_a_duration_is_written_in_ascii_or_refused)(value)
    _property(settings.test_a_size_is_written_in_ascii_or_refused)(value)


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = MappingProxyType(
    {
        "payload": _payload,
        "headers": _headers,
        "table": _table,
        "settings": _settings,
        "argument": _argument,
    }
)
