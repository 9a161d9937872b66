"""What the classifier says about each kind of exception; first match wins."""

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import httpx
import msgspec
import pydantic
import pytest
from sqlalchemy import exc as sqlalchemy_exc

from towpath.errors import (
    BrokerUnavailable,
    DeadlinePassed,
    DecodeError,
    HandlerTimeout,
    InvalidMessage,
    LeaseLost,
    PayloadTooLarge,
    SchemaMismatch,
    StoreUnavailable,
)
from towpath.failures import Classifier, Failure
from towpath.outcomes import Dead, Reject, Retry, Snooze

DEFAULT = Classifier()


def raised(error: BaseException, *, cause: BaseException | None = None) -> BaseException:
    try:
        if cause is not None:
            raise error from cause
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


def verdict(failure: Failure) -> tuple[str, str, str]:
    return failure.kind, failure.scope, failure.reason_code


class TestWhatAHandlerRaisesOnPurpose:
    def test_retry_keeps_its_reason_and_its_floor(self) -> None:
        failure = DEFAULT.classify(Retry("stock_low", after="90s"))
        assert verdict(failure) == ("retry", "message", "stock_low")
        assert failure.retry_after == timedelta(seconds=90)
        assert not failure.is_free

    def test_snooze_is_free_and_carries_its_delay(self) -> None:
        failure = DEFAULT.classify(Snooze("5m", reason="not_picked_yet"))
        assert verdict(failure) == ("snooze", "message", "not_picked_yet")
        assert failure.retry_after == timedelta(minutes=5)
        assert failure.is_free

    def test_dead_is_dead_with_its_detail_as_the_message(self) -> None:
        failure = DEFAULT.classify(Dead("gone", "the account was closed"))
        assert verdict(failure) == ("dead", "message", "gone")
        assert failure.error_message == "the account was closed"

    def test_it_counts_inside_a_task_group(self) -> None:
        group = ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("x"), Snooze("1m")])
        assert DEFAULT.classify(group).kind == "snooze"

    def test_it_beats_a_rule_for_its_class(self) -> None:
        rules = Classifier({Exception: Dead("everything")})
        assert rules.classify(Retry("mine")).kind == "retry"

    def test_one_that_was_only_the_context_of_another_error_does_not_count(self) -> None:
        assert DEFAULT.classify(raised(ValueError("later"), cause=Snooze("1m"))).kind == "retry"


class TestWhatTheEngineStopped:
    def test_a_handler_timeout_spends_an_attempt_and_is_not_tried_in_place(self) -> None:
        failure = DEFAULT.classify(raised(HandlerTimeout("after 300 s"), cause=TimeoutError()))
        assert verdict(failure) == ("retry", "message", "handler_timeout")
        assert (failure.is_free, failure.in_place) == (False, False)

    def test_a_passed_deadline_ends_the_task(self) -> None:
        """C12"""
        assert verdict(DEFAULT.classify(DeadlinePassed("late"))) == ("dead", "message", "deadline_passed")

    def test_a_deadline_beats_a_rule_for_everything(self) -> None:
        """C12"""
        assert Classifier({Exception: Retry}).classify(DeadlinePassed("late")).kind == "dead"

    def test_a_cancellation_is_free(self) -> None:
        failure = DEFAULT.classify(asyncio.CancelledError())
        assert verdict(failure) == ("retry", "message", "cancelled")
        assert failure.is_free


class TestWhatCannotBeDecoded:
    def test_a_decode_error_is_dead_with_its_reason(self) -> None:
        """C11"""
        failure = DEFAULT.classify(DecodeError("not_json", "at byte 3"))
        assert verdict(failure) == ("dead", "message", "not_json")

    def test_validation_errors_are_recognised_without_importing_their_library(self) -> None:
        class Order(pydantic.BaseModel):
            amount: int

        with pytest.raises(pydantic.ValidationError) as pydantic_error:
            Order.model_validate({"amount": "many"})
        with pytest.raises(msgspec.ValidationError) as msgspec_error:
            msgspec.convert("many", int)
        for error in (pydantic_error.value, msgspec_error.value):
            assert verdict(DEFAULT.classify(error)) == ("dead", "message", "validation")

    def test_a_rule_for_the_validation_class_itself_beats_the_guess(self) -> None:
        with pytest.raises(pydantic.ValidationError) as caught:
            pydantic.TypeAdapter(int).validate_python("x")
        assert Classifier({pydantic.ValidationError: Retry}).classify(caught.value).kind == "retry"
        assert Classifier({Exception: Retry}).classify(caught.value).kind == "dead"


class CardError(Exception): ...


class CardDeclined(CardError): ...


class TestRulesOfTheApplication:
    RULES = Classifier(
        {
            CardError: Retry,
            CardDeclined: Reject("card_declined"),
            KeyError: Dead,
            LookupError: Snooze("1m", reason="look_later"),
            OSError: Retry("disk", after="10s"),
        }
    )

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (CardDeclined(), ("reject", "message", "card_declined")),
            (CardError(), ("retry", "message", "card_error")),
            (KeyError("a"), ("dead", "message", "key_error")),
            (IndexError(), ("snooze", "message", "look_later")),
            (ConnectionResetError(), ("retry", "message", "disk")),
        ],
    )
    def test_the_most_specific_class_wins(self, error: Exception, expected: tuple[str, str, str]) -> None:
        assert verdict(self.RULES.classify(error)) == expected

    def test_a_cause_is_found_behind_an_error_without_a_rule(self) -> None:
        assert self.RULES.classify(raised(RuntimeError("x"), cause=CardDeclined())).kind == "reject"

    def test_the_error_itself_beats_its_cause(self) -> None:
        assert self.RULES.classify(raised(KeyError("x"), cause=CardDeclined())).kind == "dead"

    @pytest.mark.parametrize(("is_suppressed", "kind"), [(False, "reject"), (True, "retry")])
    def test_a_context_is_walked_unless_it_is_suppressed(self, is_suppressed: bool, kind: str) -> None:
        error = RuntimeError("while handling")
        error.__context__ = CardDeclined()
        error.__suppress_context__ = is_suppressed
        assert self.RULES.classify(error).kind == kind

    def test_members_of_nested_groups_are_found(self) -> None:
        inner = ExceptionGroup("inner", [ValueError("v"), CardDeclined()])
        assert self.RULES.classify(ExceptionGroup("outer", [ValueError("w"), inner])).kind == "reject"

    def test_a_rule_beats_sqlstate_and_status(self) -> None:
        rules = Classifier({asyncpg.UniqueViolationError: Reject("exists")})
        assert rules.classify(asyncpg.UniqueViolationError("dup")).kind == "reject"

    @pytest.mark.parametrize("rule", [Snooze, Reject, "retry", None, 5])
    def test_a_rule_that_is_none_is_refused_at_once(self, rule: Any) -> None:
        with pytest.raises(TypeError, match="rule for KeyError"):
            Classifier({KeyError: rule})

    def test_a_rule_for_something_that_is_no_exception_is_refused(self) -> None:
        with pytest.raises(TypeError, match="exception class"):
            Classifier({int: Retry})  # type: ignore[dict-item]


SQL_CASES = [
    ("40001", "retry", "message", None, True),
    ("40P01", "retry", "message", None, True),
    ("55P03", "retry", "message", None, True),
    ("08006", "retry", "infrastructure", None, False),
    ("53300", "retry", "infrastructure", None, False),
    ("57P01", "retry", "infrastructure", None, False),
    ("57P03", "retry", "infrastructure", None, False),
    ("58030", "retry", "infrastructure", None, False),
    ("25006", "retry", "infrastructure", None, False),
    ("42P01", "retry", "configuration", None, False),
    ("42703", "retry", "configuration", None, False),
    ("42501", "retry", "configuration", None, False),
    ("28P01", "retry", "configuration", None, False),
    ("3D000", "retry", "configuration", None, False),
    ("23503", "retry", "message", 4, False),
    ("23505", "retry", "message", 3, False),
    ("23514", "dead", "message", None, False),
    ("22003", "dead", "message", None, False),
    ("42601", "dead", "message", None, False),
    ("57014", "retry", "message", None, False),
    ("25P02", "retry", "message", 2, False),
    ("P0001", "retry", "message", None, False),
]


class TestSqlstate:
    @pytest.mark.parametrize(("state", "kind", "scope", "max_attempts", "is_free"), SQL_CASES)
    def test_each_class_of_the_table_means_what_the_policy_says(
        self, state: str, kind: str, scope: str, max_attempts: int | None, is_free: bool
    ) -> None:
        """C22"""
        error = asyncpg.PostgresError.new({"C": state, "M": "message"})
        failure = DEFAULT.classify(error)
        assert verdict(failure) == (kind, scope, f"sqlstate_{state.lower()}")
        assert (failure.max_attempts, failure.is_free, failure.in_place) == (max_attempts, is_free, is_free)

    def test_it_is_found_in_what_sqlalchemy_wraps(self) -> None:
        original = asyncpg.DeadlockDetectedError("deadlock")
        wrapped = sqlalchemy_exc.OperationalError("select 1", {}, original)
        assert DEFAULT.classify(wrapped).reason_code == "sqlstate_40p01"

    def test_it_is_found_in_a_cause(self) -> None:
        error = raised(RuntimeError("repository failed"), cause=asyncpg.SerializationError("x"))
        assert DEFAULT.classify(error).is_free

    def test_it_is_found_as_pgcode_and_in_the_diagnostics(self) -> None:
        class Psycopg2Error(Exception):
            pgcode = "40001"

        class Diagnostics:
            sqlstate = "40001"

        class PsycopgError(Exception):
            sqlstate = None
            diag = Diagnostics()

        for error in (Psycopg2Error(), PsycopgError()):
            assert DEFAULT.classify(error).reason_code == "sqlstate_40001"

    def test_an_attribute_of_another_shape_is_no_sqlstate(self) -> None:
        class Odd(Exception):
            sqlstate = "whatever else"

        assert DEFAULT.classify(Odd()).reason_code == "odd"

    def test_a_stale_prepared_plan_comes_again_at_once(self) -> None:
        error = asyncpg.PostgresError.new({"C": "0A000", "M": "cached plan must not change result type"})
        assert DEFAULT.classify(error).is_free

    def test_a_connection_that_died_under_the_driver_is_infrastructure(self) -> None:
        """C13"""
        invalidated = sqlalchemy_exc.DBAPIError("x", {}, Exception("gone"), connection_invalidated=True)
        closed = asyncpg.InterfaceError("cannot perform operation: connection is closed")
        starved = sqlalchemy_exc.TimeoutError("QueuePool limit reached")
        confused = asyncpg.InternalClientError("cannot switch to state 15; another operation is in progress")
        for error in (invalidated, closed, confused, starved):
            assert DEFAULT.classify(error).scope == "infrastructure"


def http_error(status: int, headers: dict[str, str] | None = None) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://api.example/charge")
    response = httpx.Response(status, headers=headers, request=request)
    return httpx.HTTPStatusError(f"status {status}", request=request, response=response)


class TestHttp:
    @pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
    def test_what_passes_is_retried(self, status: int) -> None:
        assert verdict(DEFAULT.classify(http_error(status))) == ("retry", "message", f"http_{status}")

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_refused_credential_is_configuration(self, status: int) -> None:
        """C22"""
        assert verdict(DEFAULT.classify(http_error(status))) == ("retry", "configuration", f"http_{status}")

    @pytest.mark.parametrize("status", [400, 402, 404, 409, 410, 413, 422, 451])
    def test_any_other_refusal_is_dead(self, status: int) -> None:
        assert verdict(DEFAULT.classify(http_error(status))) == ("dead", "message", f"http_{status}")

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            ("30", 30),
            (" 7 ", 7),
            ("0", 0),
            ("999999999999999999999999", 86400),
            ("86401", 86400),
            ("-5", None),
            ("1.5", None),
            ("soon", None),
            ("", None),
            ("Wed, 21 Oct 2015 07:28:30 GMT", 30),
            ("Wed, 21 Oct 2015 07:00:00 GMT", None),
            ("Fri, 21 Oct 2095 07:28:00 GMT", 86400),
            ("Wed, 99 Oct 2015 07:28:00 GMT", None),
        ],
    )
    def test_retry_after_is_a_floor_in_both_forms_and_garbage_is_ignored(
        self, value: str, seconds: int | None
    ) -> None:
        headers = {"Date": "Wed, 21 Oct 2015 07:28:00 GMT"}
        error = http_error(503, headers)
        error.response.headers["Retry-After"] = value
        expected = None if seconds is None else timedelta(seconds=seconds)
        assert DEFAULT.classify(error).retry_after == expected

    def test_a_status_is_found_where_other_clients_keep_it(self) -> None:
        class AiohttpError(Exception):
            status = 429
            headers = {"retry-after": "3"}  # noqa: RUF012

        class UrllibError(OSError):
            code = 429
            headers = {"Retry-After": "3"}  # noqa: RUF012

        class SdkError(Exception):
            status_code = 429
            response = httpx.Response(429, headers={"retry-after": "3"})

        for error in (AiohttpError(), UrllibError(), SdkError()):
            failure = DEFAULT.classify(error)
            assert (failure.reason_code, failure.retry_after) == ("http_429", timedelta(seconds=3))

    def test_botocore_keeps_it_in_the_metadata(self) -> None:
        class ClientError(Exception):
            response = {"ResponseMetadata": {"HTTPStatusCode": 503}}  # noqa: RUF012

        assert DEFAULT.classify(ClientError()).reason_code == "http_503"

    def test_an_unrelated_code_is_no_status(self) -> None:
        class ExitError(Exception):
            code = 404

        assert DEFAULT.classify(ExitError()).reason_code == "exit_error"


class TestTheRest:
    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (StoreUnavailable("away"), ("retry", "infrastructure", "store_unavailable")),
            (BrokerUnavailable("away"), ("retry", "infrastructure", "broker_unavailable")),
            (SchemaMismatch("old"), ("retry", "configuration", "configuration_schema")),
            (LeaseLost("x"), ("retry", "message", "store_lease_lost")),
            (PayloadTooLarge("t", 2, 1), ("dead", "message", "usage_payload_too_large")),
            (InvalidMessage("x"), ("retry", "message", "usage_invalid_message")),
            (ConnectionRefusedError("x"), ("retry", "message", "connection")),
            (TimeoutError(), ("retry", "message", "timeout")),
            (OSError("x"), ("retry", "message", "os_error")),
            (FileNotFoundError("x"), ("retry", "message", "file_not_found_error")),
            (RuntimeError("x"), ("retry", "message", "runtime_error")),
            (ValueError("x"), ("retry", "message", "value_error")),
        ],
    )
    def test_each_has_its_verdict(self, error: Exception, expected: tuple[str, str, str]) -> None:
        assert verdict(DEFAULT.classify(error)) == expected

    @pytest.mark.parametrize("error", [ConnectionResetError(), TimeoutError(), OSError("x")])
    def test_connection_errors_are_worth_a_try_in_place(self, error: Exception) -> None:
        failure = DEFAULT.classify(error)
        assert (failure.in_place, failure.is_free) == (True, False)

    def test_clients_that_do_not_use_oserror_are_known(self) -> None:
        assert DEFAULT.classify(httpx.ReadError("reset")).reason_code == "connection"
        assert DEFAULT.classify(httpx.ConnectTimeout("slow")).reason_code == "connection"

    @pytest.mark.parametrize(
        "error", [TypeError("x"), AttributeError("x"), NameError("x"), AssertionError(), ImportError("x")]
    )
    def test_a_programming_error_gets_two_attempts(self, error: Exception) -> None:
        failure = DEFAULT.classify(error)
        assert (failure.kind, failure.max_attempts) == ("retry", 2)

    def test_an_error_whose_attributes_raise_still_has_a_verdict(self) -> None:
        class Hostile(Exception):
            @property
            def response(self) -> object:
                raise RuntimeError("no response")

            def __str__(self) -> str:
                raise RuntimeError("no text")

        failure = DEFAULT.classify(Hostile())
        assert verdict(failure) == ("retry", "message", "hostile")
        assert "cannot be shown" in failure.error_message

    def test_a_cycle_of_causes_ends(self) -> None:
        first, second = RuntimeError("a"), RuntimeError("b")
        first.__cause__, second.__cause__ = second, first
        assert DEFAULT.classify(first).reason_code == "runtime_error"
