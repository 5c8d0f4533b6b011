"""The examination of a model, as the core knows it: its command, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_check import option_values
from mgpu_check.applications import Application
from mgpu_check.settings import Settings, option_field

WAYS = ("dp", "ddp", "fsdp1", "fsdp2", "hsdp", "tp", "tp-layers", "cp", "pp", "own", "ep", "fsdp2-tp", "fsdp-tp")
"""Names of the ways to train; `mgpu_check.models.ways` has them."""


def _ways(text: str) -> tuple[str, ...]:
    names = tuple(word.strip() for word in text.split(","))
    if unknown := [name for name in names if name not in WAYS]:
        raise ValueError(f"{unknown[0]!r} is no way to train; choose some of {', '.join(WAYS)}")
    return names


def _report(text: str, suffixes: tuple[str, ...] = (".json", ".md")) -> str:
    if not text.endswith(suffixes):
        raise ValueError(f"choose a file whose name ends in {' or '.join(suffixes)}")
    if not Path(text).parent.is_dir():
        raise ValueError(f"there is no directory {Path(text).parent}; make it first")
    return text


def _golden(text: str) -> str:
    return _report(text, (".json",))


def _text(help: str, metavar: str, default: str = "found out on the model") -> Any:
    return option_field(None, str, f"model: {help}", default, {"metavar": metavar}, repeats=default != "none")


def _file(help: str, metavar: str, parse: Any) -> Any:
    return option_field(None, parse, f"model: {help}", "none", {"metavar": metavar}, repeats=False)


@dataclass(frozen=True)
class ModelSettings:
    """The options of an examination."""

    model_target: str | None = _text(
        "the model: package.module:NAME, FILE.py:NAME or transformers:CLASS", "TARGET", "none"
    )
    model_batch: str | None = _text("module:function that makes n samples", "MODULE:FUNCTION")
    model_loss: str | None = _text("module:function(output, target) that returns the loss", "MODULE:FUNCTION")
    # seconds; nothing more is begun after them
    model_time: float = option_field(
        300.0, option_values.duration, "model: begin nothing after this time, such as 60s", "300s", {"metavar": "TIME"}
    )
    model_ways: tuple[str, ...] = option_field(
        WAYS, _ways, f"model: the ways to try, of {', '.join(WAYS)}", "all", {"metavar": "WAY,..."}
    )
    model_report: str | None = _file("write the table to this file, .json or .md", "FILE", _report)
    model_golden: str | None = _file(
        "compare the table with this .json file, or write it if it is missing", "FILE.json", _golden
    )

    def misuse(self, settings: Settings) -> str | None:
        """Return what does not fit together, and what to do; all fits."""
        return None


APPLICATION = Application(
    package="mgpu_check.models",
    command=("model",),
    frames="engine",
    options=ModelSettings,
    asked_by="model_target",
)
