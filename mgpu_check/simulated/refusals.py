"""Stand-ins for the parts of CUDA that a simulated node lacks: each refuses by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__all__ = ["refused", "refused_class"]


def refused(name: str) -> Callable[..., NoReturn]:
    """Make a function that refuses ``name``, and names it."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"{name} is not available on a simulated node; run this part on real devices")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def refused_class(name: str) -> type:
    """Make a class that refuses its own construction; it may be imported, annotated with, and subclassed."""
    refuse = refused(name)
    home, _, short = name.rpartition(".")
    return type(short, (), {"__module__": home, "__new__": lambda cls, *a, **k: refuse()})
