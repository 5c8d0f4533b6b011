"""Register replaced functions with ``torch.jit.script``, which identifies torch's functions by their ids."""

from __future__ import annotations

import torch.jit._builtins

from mgpu_check.torch_hooks.patches import Patches


def install_scripting(patches: Patches) -> None:
    """Allow scripts to call the replacements of torch's functions; install this after all replacements."""
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()
    added = {id(new): table[old] for old, new in patches.replaced() if old in table}

    def forget() -> None:
        for key in added:
            table.pop(key, None)

    table.update(added)
    patches.at_exit(forget)
