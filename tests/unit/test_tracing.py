"""One trace from the producer's span to the last replay."""

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider, sampling
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from towpath.failures import Classifier
from towpath.messages.headers import Headers
from towpath.telemetry import tracing
from towpath.telemetry.context import (
    current_trace_id,
    current_traceparent,
    extract,
    has_sdk,
    inject,
    span_context,
    trace_id_of,
    traceparent_of,
)
from towpath.telemetry.names import SCOPE, SPANS, attributes
from towpath.telemetry.sending import LINK_LIMIT_VARIABLE, SendTracer, SentWindow, link_limit
from towpath.telemetry.tracing import creation_headers, process_span, replay_span

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
MESSAGE = UUID("0190a1b2-0000-7000-8000-000000000001")
CANARY = "c4n4ry-s3cr3t"
KAFKA: dict[str, str | int] = {"system": "kafka", "server_address": "kafka-1", "server_port": 9092}


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def create(destination: str = "orders") -> Headers:
    return creation_headers(destination=destination, type_="order.placed", message_id=MESSAGE)


@dataclass(frozen=True)
class Sent:
    headers: Headers
    message_id: UUID = MESSAGE
    address: str = "orders"


class TestContextInHeaders:
    def test_outside_a_trace_there_is_nothing_to_inject(self) -> None:
        assert inject() == ()
        assert current_trace_id() is None
        assert current_traceparent() is None

    def test_what_is_injected_is_extracted_again(self, spans: InMemorySpanExporter) -> None:
        with trace.get_tracer("producer").start_as_current_span("checkout") as span:
            headers = inject()
            assert current_trace_id() == trace_id_of(headers)
            assert current_traceparent() == headers[0][1].decode()
        found = span_context(headers)
        assert found is not None
        assert found.is_remote
        assert (found.trace_id, found.span_id) == (
            span.get_span_context().trace_id,
            span.get_span_context().span_id,
        )

    def test_trace_state_survives_and_baggage_does_not(self) -> None:
        """X3"""
        headers = (("traceparent", PARENT.encode()), ("tracestate", b"vendor=1"))
        token = context.attach(baggage.set_baggage("secret", CANARY, extract(headers)))
        try:
            assert inject() == headers
        finally:
            context.detach(token)

    @pytest.mark.parametrize(
        "value",
        [
            b"",
            b"garbage",
            b"\xff\xfe",
            b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01",
            f"00-{TRACE}-0000000000000000-01".encode(),
            f"ff-{TRACE}-b7ad6b7169203331-01".encode(),
            f"00-{TRACE.upper()}-b7ad6b7169203331-01".encode(),
            f"00-{TRACE}-b7ad6b7169203331-1".encode(),
            PARENT.encode() + b"\0",
            PARENT.encode() * 1000,
        ],
    )
    def test_a_malformed_context_is_no_context(self, value: bytes) -> None:
        """X6"""
        headers = (("traceparent", value),)
        assert span_context(headers) is None
        assert trace_id_of(headers) is None
        assert traceparent_of(headers) is None

    def test_a_later_version_may_be_longer(self) -> None:
        assert trace_id_of((("traceparent", f"cc-{TRACE}-b7ad6b7169203331-01-more".encode()),)) == TRACE

    def test_a_malformed_trace_state_does_not_cost_the_trace(self) -> None:
        """X6"""
        assert trace_id_of((("traceparent", PARENT.encode()), ("tracestate", b"\xff=\x00,,="))) == TRACE

    def test_of_repeated_headers_the_first_counts(self) -> None:
        other = f"00-{'1' * 32}-b7ad6b7169203331-01".encode()
        assert trace_id_of((("traceparent", PARENT.encode()), ("traceparent", other))) == TRACE

    def test_a_trace_id_is_read_from_a_stored_traceparent(self) -> None:
        """O4"""
        assert trace_id_of(PARENT) == TRACE
        assert trace_id_of(None) is None
        assert traceparent_of((("traceparent", PARENT.encode()),)) == PARENT


class TestCreating:
    def test_the_create_span_hangs_below_the_business_span_and_its_context_travels(
        self, spans: InMemorySpanExporter
    ) -> None:
        with trace.get_tracer("producer").start_as_current_span("checkout") as business:
            headers = create()
        span = by_name(spans)["create orders"]
        assert span.kind is SpanKind.PRODUCER
        assert span.parent is not None
        assert span.parent.span_id == business.get_span_context().span_id
        assert span.context is not None
        assert span_context(headers) is not None
        assert span_context(headers).span_id == span.context.span_id  # type: ignore[union-attr]
        assert span.attributes == attributes(
            system="towpath",
            operation="create",
            operation_type="create",
            destination="orders",
            message_id=str(MESSAGE),
            type="order.placed",
        )

    def test_without_an_sdk_the_context_given_to_the_producer_is_passed_on(self) -> None:
        token = context.attach(extract((("traceparent", PARENT.encode()),)))
        try:
            assert trace_id_of(create()) == TRACE
        finally:
            context.detach(token)
        assert create() == ()

    def test_a_decision_not_to_sample_is_passed_on(
        self, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        silent = TracerProvider(sampler=sampling.ALWAYS_OFF, shutdown_on_exit=False)
        monkeypatch.setattr(tracing, "_TRACER", silent.get_tracer(SCOPE))
        headers = create()
        assert int(headers[0][1][-2:], 16) & trace.TraceFlags.SAMPLED == 0


class TestProcessing:
    def run(self, headers: Headers, **options: object) -> tracing.ProcessSpan:
        with process_span(
            headers,
            destination="orders",
            group="billing",
            message_id=MESSAGE,
            type_="order.placed",
            **options,  # type: ignore[arg-type]
        ) as span:
            pass
        return span

    def test_retries_and_replays_share_the_trace_of_the_creation(self, spans: InMemorySpanExporter) -> None:
        """O4"""
        headers = create()
        first = self.run(headers, attempt=1)
        stored = (("traceparent", (first.traceparent or "").encode()),)
        self.run(stored, attempt=2, trigger="retry")
        with replay_span(
            stored, destination="orders", group="billing", message_id=MESSAGE, type_=None, actor="ann"
        ):
            pass
        self.run(stored, attempt=3, trigger="replay")
        finished = spans.get_finished_spans()
        creation = by_name(spans)["create orders"].context
        assert creation is not None
        assert [span.name for span in finished] == [
            "create orders",
            "process orders",
            "process orders",
            "replay orders",
            "process orders",
        ]
        assert {span.parent.span_id for span in finished[1:] if span.parent} == {creation.span_id}

    def test_its_attributes_follow_the_conventions(self, spans: InMemorySpanExporter) -> None:
        self.run(create(), attempt=2, run_no=1, trigger="retry", labels=KAFKA)
        span = by_name(spans)["process orders"]
        assert span.kind is SpanKind.CONSUMER
        assert span.attributes == attributes(
            **KAFKA,
            operation="process",
            operation_type="process",
            destination="orders",
            group="billing",
            message_id=str(MESSAGE),
            type="order.placed",
            trigger="retry",
            attempt=2,
            run_no=1,
        )

    def test_a_message_without_context_gets_one_that_later_attempts_join(
        self, spans: InMemorySpanExporter
    ) -> None:
        """O4"""
        first = self.run(())
        assert first.traceparent is not None
        second = self.run((("traceparent", first.traceparent.encode()),), attempt=2, trigger="retry")
        assert first.trace_id == second.trace_id

    def test_it_is_current_inside_so_that_what_a_handler_emits_hangs_below_it(
        self, spans: InMemorySpanExporter
    ) -> None:
        with process_span(
            create(), destination="orders", group="billing", message_id=MESSAGE, type_="order.placed"
        ):
            create("invoices")
        found = by_name(spans)
        process = found["process orders"].context
        emitted = found["create invoices"].parent
        assert process is not None
        assert emitted is not None
        assert emitted.span_id == process.span_id

    def test_without_an_sdk_the_trace_id_is_still_known(self) -> None:
        span = self.run((("traceparent", PARENT.encode()),))
        assert span.trace_id == TRACE
        assert span.traceparent == PARENT

    def test_a_failure_is_told_by_class_code_and_redacted_message(self, spans: InMemorySpanExporter) -> None:
        """X3"""
        error = ValueError(f"password={CANARY}")
        with process_span(
            create(), destination="orders", group="billing", message_id=MESSAGE, type_="order.placed"
        ) as span:
            span.failed(Classifier().classify(error))
            span.retry_scheduled(timedelta(seconds=2))
            span.settled("retry", "value_error")
        finished = by_name(spans)["process orders"]
        assert finished.status.status_code is StatusCode.ERROR
        assert finished.attributes is not None
        assert finished.attributes["error.type"] == "ValueError"
        assert finished.attributes["towpath.outcome"] == "retry"
        assert [event.name for event in finished.events] == ["task.retry_scheduled"]
        assert CANARY not in finished.to_json()

    def test_an_exception_marks_it_and_goes_on(self, spans: InMemorySpanExporter) -> None:
        """X3"""
        with (
            pytest.raises(RuntimeError),
            process_span(
                create(), destination="orders", group="billing", message_id=MESSAGE, type_="order.placed"
            ),
        ):
            raise RuntimeError(f"token={CANARY}")
        finished = by_name(spans)["process orders"]
        assert finished.status.status_code is StatusCode.ERROR
        assert CANARY not in finished.to_json()


class TestSending:
    def test_a_window_is_one_span_below_the_first_creation_and_linked_to_all(
        self, spans: InMemorySpanExporter
    ) -> None:
        """O4"""
        messages = [Sent(create()), Sent(create(), message_id=uuid4())]
        with SendTracer(KAFKA).window(messages) as window:
            window.acknowledged = {0, 1}
        creations = [
            span.context.span_id
            for span in spans.get_finished_spans()
            if span.name == "create orders" and span.context
        ]
        (sent,) = [span for span in spans.get_finished_spans() if span.name.startswith("send")]
        assert sent.name == "send orders"
        assert sent.kind is SpanKind.CLIENT
        assert sent.parent is not None
        assert sent.parent.span_id == creations[0]
        assert [link.context.span_id for link in sent.links] == creations
        assert [dict(link.attributes or {}) for link in sent.links] == [
            attributes(message_id=str(message.message_id)) for message in messages
        ]
        assert sent.status.status_code is StatusCode.UNSET
        assert sent.attributes == attributes(
            **KAFKA, operation="send", operation_type="send", destination="orders", batch_count=2
        )

    def test_what_varies_within_a_window_is_told_by_its_links(self, spans: InMemorySpanExporter) -> None:
        messages = [Sent(create()), Sent(create("invoices"), address="invoices"), Sent(create())]
        with SendTracer(KAFKA).window(messages) as window:
            window.acknowledged = {0, 2}
            window.refused = {1: "too_large"}
        sent = by_name(spans)["send"]
        assert "messaging.destination.name" not in (sent.attributes or {})
        told = [
            ((link.attributes or {})["messaging.destination.name"], (link.attributes or {}).get("error.type"))
            for link in sent.links
        ]
        assert told == [("invoices", "too_large"), ("orders", None), ("orders", None)]
        assert sent.status.status_code is StatusCode.UNSET

    def test_a_window_of_which_nothing_arrived_has_failed(self, spans: InMemorySpanExporter) -> None:
        with SendTracer(KAFKA).window([Sent(create())]) as window:
            window.refused = {0: "unroutable"}
        sent = by_name(spans)["send orders"]
        assert sent.status.status_code is StatusCode.ERROR
        assert (sent.attributes or {})["error.type"] == "unroutable"

    def test_a_window_that_failed_says_so_redacted(self, spans: InMemorySpanExporter) -> None:
        """X3"""
        with SendTracer(KAFKA).window([Sent(create())]) as window:
            window.error = f"cannot reach kafka://app:{CANARY}@broker:9092"
        assert by_name(spans)["send orders"].status.status_code is StatusCode.ERROR
        for span in spans.get_finished_spans():
            assert CANARY not in span.to_json()

    def test_unsampled_and_untraced_messages_cost_no_link(self, spans: InMemorySpanExporter) -> None:
        unsampled = PARENT.removesuffix("01") + "00"
        messages = [
            Sent(()),
            Sent((("traceparent", unsampled.encode()),)),
            Sent((("traceparent", b"junk"),)),
        ]
        with SendTracer(KAFKA).window(messages):
            pass
        (sent,) = spans.get_finished_spans()
        assert (sent.name, sent.parent, sent.links) == ("send orders", None, ())

    def test_links_are_limited_and_refused_messages_come_first(
        self, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(LINK_LIMIT_VARIABLE, "100")
        messages = [Sent((("traceparent", PARENT.encode()),), message_id=uuid4()) for _ in range(200)]
        with SendTracer(KAFKA).window(messages) as window:
            window.refused = {199: "too_large"}
            window.acknowledged = set(range(199))
        sent = by_name(spans)["send orders"]
        assert len(sent.links) == 100
        assert (sent.links[0].attributes or {})["messaging.message.id"] == str(messages[199].message_id)

    @pytest.mark.parametrize("value", [None, "", " 300 ", "0"])
    def test_the_limit_of_links_is_the_sdks_own(
        self, value: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(LINK_LIMIT_VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(LINK_LIMIT_VARIABLE, value)
        assert link_limit() == SpanLimits().max_links

    def test_without_an_sdk_messages_are_not_even_looked_at(self) -> None:
        class Untouchable:
            def __getattr__(self, name: str) -> object:
                raise AssertionError(name)

        assert not has_sdk()
        with SendTracer(KAFKA).window([Untouchable()]) as window:  # type: ignore[list-item]
            assert window == SentWindow()


def test_each_span_is_of_the_kind_and_has_the_attributes_that_are_listed(spans: InMemorySpanExporter) -> None:
    """O4"""
    headers = create()
    with SendTracer(KAFKA).window([Sent(headers)]) as window:
        window.refused = {0: "too_large"}
    about = {"destination": "orders", "group": "billing", "message_id": MESSAGE, "type_": "order.placed"}
    with process_span(headers, **about, labels=KAFKA) as span:  # type: ignore[arg-type]
        span.failed(Classifier().classify(ValueError()))
        span.settled("dead", "value_error")
    with replay_span(headers, **about, actor="ann"):  # type: ignore[arg-type]
        pass
    told = {
        (span.name.replace("orders", "{destination}"), span.kind.name.lower(), *sorted(span.attributes or ()))
        for span in spans.get_finished_spans()
    }
    assert told == {
        (spec.name, spec.kind, *sorted(attributes(**dict.fromkeys(spec.attributes, "x")))) for spec in SPANS
    }
    assert all(spec.description.endswith(".") for spec in SPANS)
