"""Notice draws from generators that the script has made itself, which a replay does not cover."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

from mgpu_check.processes.frames import is_installed
from mgpu_check.torch_hooks.patches import Patches

_MOST = 256  # generators whose states are compared, to bound the time


class OwnGenerators:
    """The generators of `random.Random`, `numpy.random.default_rng` and `RandomState` that the script has made.

    Args:
        active: returns whether generators count now.
    """

    def __init__(self, active: Callable[[], bool]) -> None:
        self._active = active
        self._made: list[tuple[str, Any, str]] = []  # the name, the generator and its first state
        self._states: list[str] = []

    def install(self) -> None:
        """Watch the constructors of this process."""
        patches = Patches()
        patches.wrap(random.Random, "__init__", lambda original: self._watched("random.Random", original, at=0))
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            patches.wrap(
                numpy, "default_rng", lambda original: self._watched("numpy.random.default_rng", original, at=None)
            )
            patches.replace(numpy.RandomState, self._random_state(numpy.RandomState))
            patches.apply()

    def drawn(self) -> list[tuple[str, str]]:
        """Return the name and the first state of each generator that was drawn from since the last call."""
        now = [_state(generator) for _, generator, _ in self._made]
        found = [made for made, own, before in zip(self._made, now, self._states, strict=True) if own != before]
        self._states = now
        return [(name, start) for name, _, start in found]

    def _watched(self, name: str, original: Callable[..., Any], at: int | None) -> Callable[..., Any]:
        """Return a constructor that adds its result, or its argument `at`, to the generators."""

        def make(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            self._add(name, made if at is None else args[at], sys._getframe(1).f_code.co_filename)
            return made

        return make

    def _random_state(self, original: type) -> type:
        class Instances(type):
            def __instancecheck__(cls, value: Any) -> bool:  # also those that were made before
                return isinstance(value, original) if cls is made else super().__instancecheck__(value)

        init = self._watched("numpy.random.RandomState", original.__init__, at=0)  # type: ignore[misc]
        made: type = Instances("RandomState", (original,), {"__init__": init, "__module__": original.__module__})
        return made

    def _add(self, name: str, generator: Any, file: str) -> None:
        known = isinstance(generator, random.SystemRandom) or any(one is generator for _, one, _ in self._made)
        if known or is_installed(file) or len(self._made) >= _MOST or not self._active():
            return
        state = _state(generator)
        self._made.append((name, generator, state))
        self._states.append(state)


def _state(generator: Any) -> str:
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
    else:
        state = generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()
    return hashlib.sha256(pickle.dumps(state)).hexdigest()[:16]
