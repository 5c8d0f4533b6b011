"""Convert a report to JSON and back.

The dataclass `RunReport` is the format. ``schema-1.json`` in this directory describes it for other programs;
``python -m mgpu_check.acceptance.report.values`` writes that file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from mgpu_check.acceptance.documents import DocumentType, read_document
from mgpu_check.acceptance.run_report import RunReport

_VERSION = 1  # rises when a reader of the previous version would misread a file. Within a version, fields may be added.
FORM = DocumentType(
    "mgpu-check acceptance", _VERSION, RunReport, "`mgpu-check accept --report=FILE.json` writes such a file"
)
SCHEMA = Path(__file__).with_name(f"schema-{_VERSION}.json")


def to_json(report: RunReport) -> str:
    """Return the report as a JSON document, each observation, measurement and sample on a line of its own."""
    document = {"format": FORM.name, "version": FORM.version, **encoded(report)}
    entries = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def encoded(value: Any) -> Any:
    """Return `value` in types of JSON, other types as text, so that no evidence can make the report fail."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encoded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encoded(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(element) for element in value]
    return str(value)


def read(path: Path) -> RunReport:
    """Read a JSON report, or raise ValueError that names the invalid field."""
    return FORM.decoded(read_document(path), str(path))


def schema() -> str:
    url = f"https://github.com/mgpu-check/mgpu-check/blob/main/mgpu_check/acceptance/report/{SCHEMA.name}"
    document = FORM.schema(f"{FORM.name}, version {FORM.version}")
    return json.dumps({"$id": url, **document}, indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema())
