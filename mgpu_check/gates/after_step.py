"""Have all ranks come to the end of a step, before the gate enters collectives of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from mgpu_check.rank_side.pausing import pause

__all__ = ["after_step"]


def after_step(number: int, steps: int, modules: Mapping[str, nn.Module]) -> None:
    """Wait for all ranks after a step, and compare their calls; see `pause`.

    Args:
        number: of the step, from 0.
        modules: by a prefix of the names of their parameters. The gate gathers gradients that are spread over ranks, which
            takes all these ranks.
    """
    pause(f"step {number + 1}", last=number + 1 == steps, held=_sharded_gradients(modules))


def _sharded_gradients(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for prefix, module in modules.items():
        for name, value in module.named_parameters():
            mesh = getattr(value.grad, "device_mesh", None)  # None where it is no DTensor, or none at all
            if mesh is not None:
                yield f"gradient of {prefix}{name}", tuple(mesh.mesh.flatten().tolist())
