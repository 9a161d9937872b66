"""What we use of Kubernetes kinds whose schemas no package carries."""

from typing import Any, Final


def only(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def complete(**properties: Any) -> dict[str, Any]:
    return {**only(**properties), "required": list(properties)}


def several(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


TEXT: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 1}
_NAMED = only(name=TEXT, namespace=TEXT)
_REFERENCE = complete(name=TEXT)


def _trigger(name: str, **metadata: Any) -> dict[str, Any]:
    return {"required": ["type", "metadata"], **only(
        type={"const": name}, metadata=complete(**metadata), authenticationRef=_REFERENCE
    )}  # fmt: skip


_NUMBER = {"type": "string", "pattern": r"^[0-9]+$"}
"""KEDA takes nothing but text in a trigger's metadata."""
KUSTOMIZATION: Final = {
    **only(
        apiVersion=TEXT, kind=TEXT, namespace=TEXT, resources=several(TEXT),
        images=several(complete(name=TEXT, newTag=TEXT)), patches=several(complete(path=TEXT)),
    ),
    "required": ["apiVersion", "kind", "resources"],
}  # fmt: skip
SCHEMAS: Final = {
    "ScaledObject": complete(
        scaleTargetRef=_REFERENCE, minReplicaCount=_COUNT, maxReplicaCount=_COUNT, cooldownPeriod=_COUNT,
        triggers=several({"oneOf": [
            _trigger("kafka", bootstrapServers=TEXT, consumerGroup=TEXT, lagThreshold=_NUMBER),
            _trigger("postgresql", query=TEXT, targetQueryValue=_NUMBER),
            _trigger("rabbitmq", protocol={"const": "http"}, queueName=TEXT, useRegex={"const": "true"},
                     operation={"const": "sum"}, mode={"const": "QueueLength"}, value=_NUMBER),
        ]}),
    ),
    "TriggerAuthentication": complete(secretTargetRef=several(complete(parameter=TEXT, name=TEXT, key=TEXT))),
    "PodMonitor": complete(
        selector=complete(matchLabels={"type": "object"}),
        podMetricsEndpoints=several(complete(port=TEXT, path=TEXT, relabelings=several({"type": "object"}))),
    ),
}  # fmt: skip

_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|[smhdwy]))+$"}
RULES: Final = complete(groups=several(complete(name=TEXT, rules=several({
    "required": ["alert", "expr", "labels", "annotations"],
    **only(
        alert={"type": "string", "pattern": r"^Towpath\w+$"}, expr=TEXT, **{"for": _DURATION},
        labels=complete(severity={"enum": ["warning", "critical"]}),
        annotations=complete(summary=TEXT, runbook=TEXT),
    ),
}))))  # fmt: skip
"""What we use of a file of alerting rules."""


def described(spec: dict[str, Any]) -> dict[str, Any]:
    """A document around its specification."""
    return complete(apiVersion=TEXT, kind=TEXT, metadata=_NAMED, spec=spec)
