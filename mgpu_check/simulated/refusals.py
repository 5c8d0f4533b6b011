"""Replace the parts of CUDA that a simulated node lacks by functions and classes that raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def refused(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises RuntimeError because ``name`` is not available."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"{name} is not available on a simulated node; run this part on real devices")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def refused_class(name: str) -> type:
    """Return a class whose construction raises RuntimeError; code may import it, annotate with it, and subclass it."""
    refuse = refused(name)
    home, _, short = name.rpartition(".")
    return type(short, (), {"__module__": home, "__new__": lambda cls, *a, **k: refuse()})
