"""One trace from span files as a tree for people: emit, relay, process, retry, replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from towpath.errors import MissingExtra
from towpath.failures import redact
from towpath.telemetry.files import SpanRecord, read_spans
from towpath.telemetry.names import ATTRIBUTES

if TYPE_CHECKING:
    from rich.tree import Tree

_SHOWN: Final = ("group", "attempt", "outcome", "reason", "actor")
_STEPS: Final = {"create": "emit", "send": "relay", "replay": "replay"}
_TEXT_LIMIT: Final = 100
_WAITED: Final = frozenset({"retry", "snooze", "delay", "replay", "promoted", "lost"})


@dataclass(slots=True)
class SpanNode:
    """A span with its children, in order of their start."""

    span: SpanRecord
    children: list[SpanNode] = field(default_factory=list)

    @property
    def step(self) -> str:
        """What it is in the life of a message: emit, relay, process, retry, …, or the span's name."""
        verb = self.span.name.partition(" ")[0]
        if verb == "process":
            trigger = self._attribute("trigger")
            return trigger if trigger in _WAITED else "process"
        return _STEPS.get(verb, self.span.name)

    def details(self) -> dict[str, str]:
        """The attributes worth a line, by their short names; the message's type where it begins."""
        names = ("type", *_SHOWN) if self.step == "emit" else _SHOWN
        return {name: value for name in names if (value := self._attribute(name))}

    def _attribute(self, name: str) -> str:
        return str(self.span.attributes.get(ATTRIBUTES[name], ""))


@dataclass(frozen=True, slots=True)
class TraceTree:
    """One trace. More than one root: a span's parent was not recorded, or was lost in a crash."""

    trace_id: str
    roots: tuple[SpanNode, ...]

    @property
    def spans(self) -> tuple[SpanRecord, ...]:
        """All spans, parents first; one that stands in several places comes several times."""
        return tuple(node.span for node, _ in self.walk())

    def walk(self) -> Iterable[tuple[SpanNode, int]]:
        """Every node with its depth, depth first."""
        stack = [(root, 0) for root in reversed(self.roots)]
        while stack:
            node, depth = stack.pop()
            yield node, depth
            stack.extend((child, depth + 1) for child in reversed(node.children))

    @property
    def is_connected(self) -> bool:
        """Whether one span is above all others."""
        return len(self.roots) == 1


def load_trace(paths: Iterable[Path], trace_id: str) -> TraceTree:
    """The spans of one trace and those that link to it, as a tree. An unknown trace has no roots."""
    wanted = trace_id.strip().lower()
    return build_tree(wanted, list(read_spans(paths)))


def build_tree(trace_id: str, spans: Sequence[SpanRecord]) -> TraceTree:
    """A tree of the trace's spans among these; a span that was exported twice counts once.

    One that links to a span of the trace, as a relay's window does, stands below that one too.
    """
    unique = {span.span_id: span for span in sorted(spans, key=_order)}
    nodes = {key: SpanNode(span) for key, span in unique.items() if span.trace_id == trace_id}
    roots: list[SpanNode] = []
    for span in unique.values():
        node = nodes.get(span.span_id)
        above = span.parent_id if node is not None and span.parent_id != span.span_id else None
        if above in nodes:
            nodes[above].children.append(nodes[span.span_id])
        elif node is not None:
            roots.append(node)
        for linked in dict.fromkeys(span_id for of, span_id in span.links if of == trace_id):
            if linked in nodes and linked != above:
                nodes[linked].children.append(SpanNode(span))
    return TraceTree(trace_id, tuple(roots))


def render_trace(paths: Iterable[Path], trace_id: str) -> Tree:
    """The trace as a rich tree: step, span, service, offset from the start, duration, outcome.

    Print it with a rich console. Raises MissingExtra without rich.
    """
    try:
        from rich.text import Text  # noqa: PLC0415 - optional dependency
        from rich.tree import Tree  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise MissingExtra("cli", "rendering a trace") from error
    trace = load_trace(paths, trace_id)
    spans = trace.spans
    tree = Tree(Text(f"trace {trace.trace_id}", style="bold"))
    if not spans:
        tree.add(Text("no span of this trace in the files", style="dim"))
        return tree
    begin = min(span.start_ns for span in spans)
    branches: dict[int, Tree] = {-1: tree}
    for node, depth in trace.walk():
        label = Text()
        style = "red" if node.span.status == "error" else "green"
        step = "" if node.step == node.span.name else f"{_shown(node.step):<8} "
        label.append(step, style=f"bold {style}")
        label.append(_shown(node.span.name))
        label.append(f"  {_shown(node.span.service)}", style="cyan")
        label.append(f"  +{_seconds((node.span.start_ns - begin) / 1e9)}", style="dim")
        label.append(f"  {_seconds(node.span.duration_seconds)}", style="yellow")
        details = node.details()
        for name, value in details.items():
            label.append(f"  {name}={_shown(value)}", style="dim")
        if node.span.status_message and "reason" not in details:
            label.append(f"  {_shown(node.span.status_message)}", style="red")
        branches[depth] = branches[depth - 1].add(label)
    return tree


def _shown(text: str) -> str:
    """What a file says, on one line and without terminal escapes."""
    return redact(" ".join(text.split()), limit=_TEXT_LIMIT)


def _order(span: SpanRecord) -> tuple[int, int, str]:
    return (span.start_ns, -span.end_ns, span.span_id)


def _seconds(value: float) -> str:
    if value < 0.0995:
        return f"{value * 1000:.1f} ms"
    return f"{value:.2f} s" if value < 60 else f"{value / 60:.1f} min"
