"""The settings as a JSON Schema, which a settings file can be checked and completed with."""

from datetime import timedelta
from typing import Any

from pydantic import SecretStr
from pydantic.json_schema import GenerateJsonSchema

from towpath.backoff import duration_text
from towpath.settings.model import Settings


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        """Defaults as a person writes them. That of a secret is none."""
        if isinstance(dft, timedelta):
            return duration_text(dft)
        return dft.get_secret_value() if isinstance(dft, SecretStr) else super().encode_default(dft)


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the settings file. Nothing is required there: variables may give it."""
    schema = Settings.model_json_schema(schema_generator=_Generator)
    schema.pop("required")
    return {"$schema": _Generator.schema_dialect, **schema}
