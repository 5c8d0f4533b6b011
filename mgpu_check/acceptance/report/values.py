"""Convert an account to JSON and back. ``schema-1.json`` in this directory describes the format."""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mgpu_check.acceptance.account import Account

__all__ = ["FORMAT", "SCHEMA", "VERSION", "encoded", "read", "to_json"]

FORMAT = "mgpu-check acceptance"
VERSION = 1
"""Rises when a reader of the previous version would misread a file. Within a version, fields may be added."""
SCHEMA = Path(__file__).with_name(f"schema-{VERSION}.json")

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SHOWN = 60


def to_json(account: Account) -> str:
    """Return the account as a JSON document, each observation, measurement and sample on a line of its own."""
    document = {"format": FORMAT, "version": VERSION, **encoded(account)}
    parts = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def encoded(value: Any) -> Any:
    """Return `value` in types of JSON, other types as text, so that no evidence can make the report fail."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encoded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encoded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(part) for part in value]
    return str(value)


def read(path: Path) -> Account:
    """Read the account of a JSON report.

    Raises:
        ValueError: the file cannot be read, is not a report, or has another version of the format. The message names the
            invalid field.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON: {error}; give a report of `mgpu-check accept --report=FILE.json`"
        ) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} is not a report of an acceptance; give one of `mgpu-check accept --report=FILE.json`")
    version = document.get("version")
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version!r} of the format, and this mgpu-check reads version {VERSION}; read it with the "
            "mgpu-check that wrote it, or a newer one"
        )
    try:
        account = _decoded(Account, document, "")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error}; let `mgpu-check accept --report=FILE.json` write it anew"
        ) from None
    assert isinstance(account, Account)
    return account


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to the annotation `kind`.

    Raises:
        ValueError: the value does not fit; names the field `where`.
    """
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, value, where)
    if origin is Literal:
        _expect(value in arguments and isinstance(value, str), value, where, f"one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        _expect(isinstance(value, list), value, where, "a list")
        return tuple(_decoded(arguments[0], part, f"{where}[{number}]") for number, part in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(value, dict), value, where, "an object")
        number = arguments[0] is int
        _expect(not number or all(key.isdigit() for key in value), value, where, "an object whose names are numbers")
        return {
            int(key) if number else key: _decoded(arguments[1], part, f"{where}.{key}") for key, part in value.items()
        }
    if is_dataclass(kind):
        return _of_class(kind, value, where)
    return _plain(kind, value, where)


def _of_class(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), value, where, "an object")
    given = {}
    for field in fields(kind):
        if field.name in value:
            given[field.name] = _decoded(
                _hints(kind)[field.name], value[field.name], f"{where}.{field.name}".lstrip(".")
            )
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where or 'the document'} lacks {field.name!r}")
    return kind(**given)


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in kinds:
        try:
            return _decoded(kind, value, where)
        except ValueError:
            continue
    if isinstance(value, bool) and int in kinds:
        return value  # facts of telemetry may be true or false, and bool is an int in Python
    raise ValueError(
        f"{where} is {_short(value)}, not {' or '.join(getattr(kind, '__name__', str(kind)) for kind in kinds)}"
    )


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is type(None):
        _expect(value is None, value, where, "null")
    elif kind is float:
        if isinstance(value, str):
            _expect(value in _NOT_FINITE, value, where, "a number")
            return _NOT_FINITE[value]
        _expect(isinstance(value, (int, float)) and not isinstance(value, bool), value, where, "a number")
        return float(value)
    else:
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        _expect(right, value, where, {int: "an integer", str: "a text", bool: "true or false"}[kind])
    return value


def _expect(right: bool, value: Any, where: str, what: str) -> None:
    if not right:
        raise ValueError(f"{where or 'the document'} is {_short(value)}, not {what}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
