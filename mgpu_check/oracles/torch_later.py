"""Stand for torch in tables that processes without torch read too: the first use of an attribute imports it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["F", "nn", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn import functional as F
else:

    class _OnFirstUse:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    torch, nn, F = (_OnFirstUse(name) for name in ("torch", "torch.nn", "torch.nn.functional"))
