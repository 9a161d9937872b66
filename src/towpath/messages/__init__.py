"""Messages: how they are declared, encoded and carried."""

from towpath.messages.codecs import decode, encode
from towpath.messages.envelope import (
    Body,
    Envelope,
    Message,
    WireKind,
    read_envelope,
    source_of,
    wire_headers,
)
from towpath.messages.headers import Headers, HeadersInput, check_headers, dump_headers, load_headers
from towpath.messages.registry import Kind, MessageSpec, RawMessage, event, key_of, spec_of, task

__all__ = [
    "Body",
    "Envelope",
    "Headers",
    "HeadersInput",
    "Kind",
    "Message",
    "MessageSpec",
    "RawMessage",
    "WireKind",
    "check_headers",
    "decode",
    "dump_headers",
    "encode",
    "event",
    "key_of",
    "load_headers",
    "read_envelope",
    "source_of",
    "spec_of",
    "task",
    "wire_headers",
]
