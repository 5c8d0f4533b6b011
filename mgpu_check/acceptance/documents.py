"""Read JSON files, and write files atomically.

Every error of reading names the file, the key, its value and the valid values.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from mgpu_check.devices.observations import Number

Text = Annotated[str, msgspec.Meta(min_length=1, description="a text that is not empty")]
Texts = Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, description="a list of at least one text")]
Count = Annotated[int, msgspec.Meta(ge=0, description="an integer of at least 0")]
Positive = Annotated[int, msgspec.Meta(ge=1, description="an integer of at least 1")]
# No comparison with zero, infinity or NaN fails.
Amount = Annotated[float, msgspec.Meta(gt=0, lt=1e300, description="a finite number above 0")]
Spread = Annotated[float, msgspec.Meta(ge=0, lt=1e300, description="a finite number of at least 0")]

Content = TypeVar("Content")
_ABSENT = object()
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_SCHEMA_OF_NUMBER = {"anyOf": [{"type": "number"}, {"enum": [*_NOT_FINITE]}]}
_EXACT = 2.0**53  # up to here each integer is a float of its own
_WORDS = {int: "an integer", str: "a text", bool: "true or false", NoneType: "null"}
_WORDS |= dict.fromkeys((float, Number), "a number")


def read_document(path: Path) -> Any:
    """Read a JSON file, or raise ValueError. 80e9 becomes an integer."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}. Give a JSON file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}). Give a JSON file") from error
    try:
        return json.loads(text, parse_float=_parsed)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _parsed(text: str) -> float:
    """Return a whole number as an integer: people write 80e9 for a number of bytes, and JSON has one type of number."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old content or the new content, never a part."""
    target = path.resolve()  # replace the target of a symbolic link, not the link
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@dataclass(frozen=True)
class DocumentType(Generic[Content]):
    """A kind of JSON file. Its content is an instance of a dataclass, so the annotations of the dataclass are the
    format.
    """

    # name, version: the values of ``format`` and ``version`` in the file
    name: str
    version: int
    content: type[Content]  # the dataclass. If it has a field ``file``, that is the name of the file.
    origin: str  # where such a file comes from, as a sentence for error messages

    def decoded(self, document: Any, file: str) -> Content:
        """Make the content from a parsed JSON document, or raise ValueError that names the key and its valid values."""
        problem = _head(self, document)
        if problem is None:
            document = {**document, "file": file}
            try:
                return convert(document, self.content)
            except msgspec.ValidationError:
                problem = _misfit(self.content, document, "")
        raise ValueError(f"{file}: {problem}. {self.origin}")

    def schema(self, title: str) -> dict[str, Any]:
        """Return the JSON schema of the file. The docstrings of the dataclasses are its descriptions."""
        (_,), kinds = msgspec.json.schema_components((self.content,), schema_hook=lambda _: dict(_SCHEMA_OF_NUMBER))
        for definition in kinds.values():
            _describe(definition)
        root = kinds.pop(self.content.__name__)
        head = {"format": {"const": self.name}, "version": {"const": self.version}}
        own = {"properties": {**head, **root["properties"]}, "required": [*head, *root["required"]], "$defs": kinds}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "title": title, **own}


def _describe(definition: dict[str, Any]) -> None:
    """Give the properties of a class the descriptions that its docstring has under "Attributes:"."""
    text, _, attributes = inspect.cleandoc(definition["description"]).partition("\n\nAttributes:\n")
    definition["description"] = text
    # msgspec before 0.23 leaves out the default of a field that is a dict: the file must not depend on who writes it.
    for field in definition["properties"].values():
        if field.get("type") == "object" and field.get("default") == {}:
            del field["default"]
    for field_names, words in re.findall(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
        for name in field_names.split(", "):
            definition["properties"][name]["description"] = " ".join(words.split())


def _head(form: DocumentType[Any], document: Any) -> str | None:
    if not isinstance(document, dict):
        return f"the whole is {_short(document)}; give an object"
    for key, expected in (("format", form.name), ("version", form.version)):
        if key not in document:
            return f"{key} is missing; give {_short(expected)}"
        if document[key] != expected:
            return f"{key} is {_short(document[key])}; give {_short(expected)}, which this version of mgpu-check reads"
    return None


def convert(value: Any, annotation: Any) -> Any:
    """Convert a parsed JSON value to an annotation, or raise `msgspec.ValidationError`."""
    return msgspec.convert(value, annotation, dec_hook=_number, str_keys=True)


def _number(number_type: Any, value: Any) -> Any:
    if value not in _NOT_FINITE and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError  # msgspec turns it into a ValidationError
    return number_type(value)


# Messages: msgspec names a type for a value that does not fit; users need the value and the valid values as well.


def _misfit(annotation: Any, value: Any, at: str) -> str:
    """Return what is wrong with a value that does not fit `annotation`: the innermost part that does not fit."""
    for inner_annotation, inner, path in _parts(annotation, value, at):
        if inner is _ABSENT:
            return f"{path} is missing; give {_valid(inner_annotation)}"
        try:
            convert(inner, inner_annotation)
        except msgspec.ValidationError:
            return _misfit(inner_annotation, inner, path)
    return f"{at} is {_short(value)}; give {_valid(annotation)}"


def _parts(annotation: Any, value: Any, at: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield the annotation, the value and the path of each part of a value; the value of a missing key is `_ABSENT`."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for alternative in arguments:
            yield from _parts(alternative, value, at)
    elif origin is Annotated:
        yield from _parts(arguments[0], value, at)
    elif is_dataclass(annotation) and isinstance(value, dict):
        hints = get_type_hints(annotation, include_extras=True)
        for field in fields(annotation):
            if field.name in value or _needed(field):
                yield hints[field.name], value.get(field.name, _ABSENT), f"{at}.{field.name}".lstrip(".")
    elif origin is tuple and isinstance(value, list):
        yield from ((arguments[0], inner, f"{at}[{number}]") for number, inner in enumerate(value))
    elif origin is Mapping and isinstance(value, dict):
        yield from ((arguments[1], inner, f"{at}.{key}") for key, inner in value.items())


def _needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _valid(annotation: Any) -> str:
    """Return in words the values that fit an annotation."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return " or ".join(map(_valid, arguments))
    if origin is Annotated:
        return str(arguments[1].description)
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if is_dataclass(annotation):
        return "an object with " + ", ".join(field.name for field in fields(annotation) if _needed(field))
    if origin is Mapping:
        return "an object whose names are numbers" if arguments[0] is int else "an object"
    return "a list" if origin is tuple else _WORDS[annotation]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
