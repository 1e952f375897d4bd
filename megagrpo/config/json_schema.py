"""The JSON schema of a config file, for editors."""

from __future__ import annotations

import json
from typing import Any

from megagrpo.config import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
DEFAULTS = (
    "The file that this one extends: a path relative to this file, or megagrpo:NAME for a config that is shipped with "
    "megagrpo."
)


def config_schema() -> dict[str, Any]:
    """Return the schema of a YAML file. Keys that a run requires may be missing, because a file may inherit them or
    leave them to the command line; so nothing is required."""
    schema = RunConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for generated in (section, *section["properties"].values()):
            generated.pop("title", None)
        section.pop("required", None)
    schema["properties"] = {"defaults": {"type": "string", "description": DEFAULTS}} | schema["properties"]
    return {"$schema": DIALECT, "title": "Config of a megagrpo run"} | schema


def schema_text() -> str:
    """Return the schema as JSON text."""
    return json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n"
