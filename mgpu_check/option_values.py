"""Read the values of options from text. Each raises ValueError that names the valid set."""

from __future__ import annotations

import math
import re
from typing import Literal, get_args

Level = Literal["glance", "quick", "standard", "long"]
LEVELS: tuple[Level, ...] = get_args(Level)
Depth = Literal["quick", "standard", "long"]
"""How much a check does at a level; see `Settings.depth`."""


_ON, _OFF = ("true", "yes", "on"), ("", "false", "no", "off")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def gpus(text: str) -> int | None:
    if text == "all":
        return None
    if re.fullmatch(r"\d+", text) and int(text) >= 1:
        return int(text)
    raise ValueError("choose a whole number of at least 1, or 'all'")


def simulate(text: str) -> str | None:
    if text.lower() in ("0", *_OFF):
        return None
    if text.lower() in ("1", *_ON):
        return "cpu"
    if re.fullmatch(r"cpu|cuda:\d+", text):
        return text
    raise ValueError("choose 'cpu', or the real device that backs the simulated ones, such as 'cuda:0'")


def seconds(text: str) -> float:
    if not 0 < (number := _number(text)) < math.inf:
        raise ValueError("choose a number of seconds above 0, such as 60 or 2.5")
    return number


KEPT_WARM = 300.0
"""Seconds that imports are kept if no time is given: enough to read a failure and mend it."""


def keep_warm(text: str) -> float | None:
    if text.lower() in _OFF:
        return None
    if text.lower() in _ON:
        return KEPT_WARM
    if not 0 <= (number := _number(text)) < math.inf:
        raise ValueError("choose seconds, such as 600; 0 to end the keeper after this run; no for none")
    return number


_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float | None:
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|)", text)
    if match is None or not float(match[1]):
        raise ValueError("choose a time above 0 with its unit, such as 90s, 30m, 2h or 3d")
    return float(match[1]) * _UNITS[match[2]]


def depth_of(level: Level) -> Depth:
    """Return how much a check does at a level: a glance makes fewer checks, each as a quick run does."""
    return "quick" if level == "glance" else level


def level(text: str) -> Level:
    for name in LEVELS:
        if name == text:
            return name
    raise ValueError(f"choose one of {', '.join(LEVELS)}")


def share(text: str) -> float:
    if not 0 < (number := _number(text)) < 1:
        raise ValueError("choose a share of the free memory, above 0 and below 1, such as 0.9")
    return number


def lines(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line.strip() for line in text.split("\n") if line.strip()))


def reports(text: str) -> tuple[str, ...]:
    files = lines(text)
    if files and all(file.lower().endswith(".md") for file in files):
        return files
    raise ValueError("choose a file whose name ends in .md")


def file(text: str) -> str | None:
    return text or None


def annotation_format(text: str) -> str:
    if text not in ("github", "none"):
        raise ValueError("choose github or none")
    return text


def switch(text: str) -> bool:
    if text.lower() in ("1", *_ON):
        return True
    if text.lower() in ("0", *_OFF):
        return False
    raise ValueError("choose true or false")
