"""``torch.jit.script`` while simulated: it knows functions of torch by their identity, and so must know what replaces them."""

from __future__ import annotations

import torch.jit._builtins

from mgpu_check.torch_hooks.patches import Patches

__all__ = ["install_scripting"]


def install_scripting(patches: Patches) -> None:
    """Let scripts call the functions that stand for those of torch; to be installed after all of them."""
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()
    added = {id(new): table[old] for old, new in patches.replaced() if old in table}

    def forget() -> None:
        for key in added:
            table.pop(key, None)

    table.update(added)
    patches.at_exit(forget)
