"""Read JSON files that people edit, and write files atomically.

Every error of reading names the file, the key, its value and the valid values.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Reader", "read_document", "write_whole"]

_ABSENT = object()


def read_document(path: Path) -> Any:
    """Read a JSON file. NaN and infinities are kept, so that the lint can report them.

    Raises:
        ValueError: the file cannot be read, or is not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}. Give a JSON file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}). Give a JSON file") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees either the old content or the new content, never a part.

    Raises:
        OSError: the file cannot be written.
    """
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


class Reader:
    """One JSON object of a file, with its path in the file for error messages.

    Args:
        file: its name, for messages.
        value: the parsed value.
        at: its path in the file, such as ``skus[3].floors[0]``.

    Raises:
        ValueError: `value` is not an object. The methods raise it if a key is missing or its value is not valid.
    """

    def __init__(self, file: str, value: Any, at: str = "") -> None:
        self.file = file
        self.at = at
        if not isinstance(value, dict):
            where = at or "the whole"
            raise ValueError(f'{file}: {where} is {_short(value)}, not an object; give {{"key": value, ...}}')
        self.value: dict[str, Any] = value

    def wrong(self, key: str, valid: str) -> ValueError:
        """Return the error for a key whose value is not valid."""
        name = f"{self.at}.{key}" if self.at else key
        if key not in self.value:
            return ValueError(f"{self.file}: {name} is missing; give {valid}")
        return ValueError(f"{self.file}: {name} is {_short(self.value[key])}; give {valid}")

    def head(self, name: str, version: int) -> None:
        """Raise ValueError unless the object has format `name` and version `version`."""
        if self.value.get("format") != name:
            raise self.wrong("format", f'"{name}"')
        if self.value.get("version") != version:
            raise self.wrong("version", f"{version}, which this version of mgpu-check reads, or record the file again")

    def object(self, key: str) -> Reader:
        """Return the object at `key`."""
        if not isinstance(self.value.get(key), dict):
            raise self.wrong(key, "an object")
        return Reader(self.file, self.value[key], f"{self.at}.{key}" if self.at else key)

    def objects(self, key: str) -> list[Reader]:
        """Return the list of objects at `key`."""
        if not isinstance(self.value.get(key), list):
            raise self.wrong(key, "a list of objects")
        prefix = f"{self.at}.{key}" if self.at else key
        return [Reader(self.file, value, f"{prefix}[{number}]") for number, value in enumerate(self.value[key])]

    def string(self, key: str) -> str:
        """Return the non-empty text at `key`."""
        value = self.value.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def strings(self, key: str) -> list[str]:
        """Return the list of at least one text at `key`."""
        value = self.value.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise self.wrong(key, "a list of at least one text")
        return value

    def texts(self, key: str) -> Mapping[str, str]:
        """Return the object of texts at `key`; empty if the key is missing."""
        value = self.value.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self.wrong(key, "an object whose values are texts")
        return value

    def choice(self, key: str, among: Sequence[str]) -> str:
        """Return the text at `key`, which must be in `among`."""
        value = self.value.get(key)
        if value not in among:
            raise self.wrong(key, "one of " + ", ".join(among))
        return str(value)

    def number(self, key: str, default: Any = _ABSENT) -> float:
        """Return the number at `key`; it may be NaN or infinite."""
        value = self.value.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        return float(value)

    def integer(self, key: str, least: int, default: Any = _ABSENT) -> int:
        """Return the integer at `key`, which must be at least `least`."""
        value = self.value.get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"an integer of at least {least}")
        return value


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
