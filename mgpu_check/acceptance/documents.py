"""Files that people keep: read as JSON, where every error names the file, the key, its value, and what is valid; and written
whole."""

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
    """Read a JSON file; NaN and infinities are read as such, for a lint to find.

    Raises:
        ValueError: it cannot be read, or is no JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}. Give a JSON file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start}). Give a JSON file") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file at once: whoever reads it sees the old one or the new one, whole.

    Raises:
        OSError: it cannot be written.
    """
    target = path.resolve()  # of a link, what it points to is replaced
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
    """One JSON object of a file, and where it stands there.

    Args:
        file: its name, for messages.
        value: what should be an object.
        at: its path in the file, such as ``skus[3].floors[0]``.
    """

    def __init__(self, file: str, value: Any, at: str = "") -> None:
        self.file = file
        self.at = at
        if not isinstance(value, dict):
            where = at or "the whole"
            raise ValueError(f'{file}: {where} is {_short(value)}, which is no object; give {{"key": value, ...}}')
        self.value: dict[str, Any] = value

    def wrong(self, key: str, valid: str) -> ValueError:
        """Return the error for a key whose value is not valid."""
        name = f"{self.at}.{key}" if self.at else key
        if key not in self.value:
            return ValueError(f"{self.file}: {name} is missing; give {valid}")
        return ValueError(f"{self.file}: {name} is {_short(self.value[key])}; give {valid}")

    def head(self, name: str, version: int) -> None:
        """Raise ValueError unless it is the file format `name`, of a version that is known."""
        if self.value.get("format") != name:
            raise self.wrong("format", f'"{name}"')
        if self.value.get("version") != version:
            raise self.wrong("version", f"{version}, which this version of mgpu-check reads, or record the file again")

    def object(self, key: str) -> Reader:
        """Return an object in it."""
        if not isinstance(self.value.get(key), dict):
            raise self.wrong(key, "an object")
        return Reader(self.file, self.value[key], f"{self.at}.{key}" if self.at else key)

    def objects(self, key: str) -> list[Reader]:
        """Return a list of objects in it."""
        if not isinstance(self.value.get(key), list):
            raise self.wrong(key, "a list of objects")
        prefix = f"{self.at}.{key}" if self.at else key
        return [Reader(self.file, value, f"{prefix}[{number}]") for number, value in enumerate(self.value[key])]

    def string(self, key: str) -> str:
        """Return a text that is not empty."""
        value = self.value.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def strings(self, key: str) -> list[str]:
        """Return a list of texts, at least one."""
        value = self.value.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise self.wrong(key, "a list of at least one text")
        return value

    def texts(self, key: str) -> Mapping[str, str]:
        """Return an object of texts; empty where there is none."""
        value = self.value.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self.wrong(key, "an object whose values are texts")
        return value

    def choice(self, key: str, among: Sequence[str]) -> str:
        """Return one of some texts."""
        value = self.value.get(key)
        if value not in among:
            raise self.wrong(key, "one of " + ", ".join(among))
        return str(value)

    def number(self, key: str, default: Any = _ABSENT) -> float:
        """Return a number; it may be NaN or infinite."""
        value = self.value.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        return float(value)

    def integer(self, key: str, least: int, default: Any = _ABSENT) -> int:
        """Return an integer of at least `least`."""
        value = self.value.get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"an integer of at least {least}")
        return value


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
