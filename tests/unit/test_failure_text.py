"""What is stored about an error: redacted, small, and the same for the same fault."""

from collections.abc import Callable
from uuid import uuid4

import asyncpg
import pydantic
import pytest
from sqlalchemy import exc as sqlalchemy_exc

from towpath.errors import StoreUnavailable
from towpath.failures import Classifier, describe, fingerprint, problem_of, redact, traceback_of

CANARY = "c4n4ry-s3cr3t"


@pytest.mark.parametrize(
    "text",
    [
        f"could not connect to postgresql://app:{CANARY}@db.internal:5432/app",
        f"amqp://app:p/{CANARY}@rabbit/vhost failed",
        f"amqps://app:a@{CANARY}@rabbit failed",
        f"https://{CANARY}@github.example/repo.git not found",
        f"password={CANARY}",
        f"PASSWORD = '{CANARY} with spaces'",
        f'{{"password": "{CANARY}", "user": "app"}}',
        f"{{'api_key': '{CANARY}'}}",
        f"TOWPATH_DATABASE_PASSWORD={CANARY};x",
        f"sasl_plain_password: {CANARY}",
        f"Authorization: Bearer {CANARY}",
        f"authorization: Basic {CANARY}==",
        f"header was bearer {CANARY}",
        f"https://x/y?api_key={CANARY}&z=1",
        f"https://x/y?access_token={CANARY}",
        f"X-Api-Key: {CANARY}",
        f"client_secret={CANARY}",
        f"Set-Cookie: {CANARY}",
        f"aws_secret_access_key => {CANARY}",
        f"sk-{CANARY}0000000000000000",
        f"-----BEGIN RSA PRIVATE KEY-----\n{CANARY}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{CANARY} cut off",
        f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ{CANARY}.{CANARY}",
    ],
)
def test_a_secret_is_masked(text: str) -> None:
    """X3"""
    assert CANARY not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "order 12 not found at https://shop.example:8080/orders/12?page=2",
        "Unexpected token '}' at position 12",
        "author=jane",
        "connection to 10.0.0.1:5432 refused",
        "the basic plan allows 3",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact(text) == text


def test_the_rest_of_a_url_stays_readable() -> None:
    assert redact("kafka://u:p@broker:9092/topic") == "kafka://[redacted]@broker:9092/topic"


def test_text_is_cut_and_made_storable() -> None:
    """C17"""
    assert redact("a\x00b\x1b[31m\ud800") == "a\ufffdb\ufffd[31m\\ud800"
    assert len(redact("x" * 5000)) == 1000
    assert redact("x" * 5000).endswith("…")


def test_sql_parameters_and_the_failing_row_are_not_stored() -> None:
    """X3"""
    original = asyncpg.UniqueViolationError("duplicate key value violates unique constraint")
    original.detail = f"Key (email)=({CANARY}) already exists."  # type: ignore[attr-defined]
    wrapped = sqlalchemy_exc.IntegrityError("insert into t values (:a)", {"a": CANARY}, original)
    assert CANARY in str(wrapped)
    assert describe(wrapped) == "duplicate key value violates unique constraint"
    assert describe(original) == "duplicate key value violates unique constraint"


@pytest.mark.parametrize(
    ("sqlstate", "text", "shown"),
    [
        ("22P02", f'invalid input syntax for type uuid: "{CANARY}"', "invalid input syntax for type uuid: …"),
        ("22000", f"invalid input for argument $1: '{CANARY}' (a str)", "invalid input for argument $1: …"),
        ("22001", "value too long for type varchar(10)", "value too long for type varchar(10)"),
        ("42P01", 'relation "orders" does not exist', 'relation "orders" does not exist'),
    ],
)
def test_a_value_that_postgres_could_not_read_is_not_stored(sqlstate: str, text: str, shown: str) -> None:
    """X3"""
    error = asyncpg.PostgresError.new({"C": sqlstate, "M": text})
    assert describe(error) == shown
    assert describe(sqlalchemy_exc.DBAPIError("select 1", {}, error)) == shown


def test_the_input_of_a_validation_error_is_not_stored() -> None:
    """X3"""

    class Order(pydantic.BaseModel):
        amount: int
        lines: list[int]

    with pytest.raises(pydantic.ValidationError) as caught:
        Order.model_validate({"amount": CANARY, "lines": [1, CANARY]})
    text = describe(caught.value)
    assert CANARY not in text
    assert "amount: Input should be a valid integer" in text
    assert "lines.1:" in text


def test_a_group_names_its_members_redacted() -> None:
    group = ExceptionGroup("two failed", [ValueError(f"password={CANARY}"), KeyError("a")])
    text = describe(group)
    assert CANARY not in text
    assert text.startswith("two failed: ValueError: password=[redacted]; KeyError: 'a'")


def test_a_group_of_one_stands_for_its_member() -> None:
    failure = Classifier().classify(ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("bad")]))
    assert (failure.error_class, failure.error_message) == ("ValueError", "bad")


def test_an_empty_message_is_the_name_of_the_class() -> None:
    assert describe(TimeoutError()) == "TimeoutError"


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("it did not raise")


def raise_in_one_place(text: str) -> None:
    raise ValueError(text)


def raise_in_another_place(text: str) -> None:
    raise ValueError(text)


def test_one_fault_has_one_fingerprint_whatever_the_ids() -> None:
    texts = [
        f"order {number} of {uuid4()} at 0x{number:x} not found (hash {number:016x})"
        for number in (7, 123456, 99)
    ]
    assert len({fingerprint(caught(lambda text=text: raise_in_one_place(text))) for text in texts}) == 1


def test_place_wording_and_class_tell_faults_apart() -> None:
    errors = [
        caught(lambda: raise_in_one_place("not found")),
        caught(lambda: raise_in_another_place("not found")),
        caught(lambda: raise_in_one_place("found twice")),
        caught(lambda: {}["amount"]),
        caught(lambda: {}["name"]),
    ]
    assert len({fingerprint(error) for error in errors}) == len(errors)


def test_library_frames_do_not_hide_the_place_in_our_own_code() -> None:
    import json

    def ours() -> object:
        return json.loads("{")

    def also_ours() -> object:
        return json.loads("{")

    assert fingerprint(caught(ours)) != fingerprint(caught(also_ours))


def test_a_traceback_shows_where_and_why_without_what_was_quoted() -> None:
    """X3"""
    try:
        try:
            raise ValueError("password=c4n4ry")
        except ValueError as cause:
            raise RuntimeError("cannot log in") from cause
    except RuntimeError as error:
        text = traceback_of(error)
    first, second = text.split("\n\n")
    assert first.startswith("Traceback (most recent call last):\n  File ")
    assert first.endswith("ValueError: password=[redacted]")
    assert second.endswith("RuntimeError: cannot log in")
    assert "test_failure_text.py" in second


def test_a_problem_says_what_to_look_at() -> None:
    """O2"""
    assert problem_of(StoreUnavailable("no answer")) == f"no answer: {StoreUnavailable.advice}"
    assert problem_of(ValueError("no answer")) == "no answer"
