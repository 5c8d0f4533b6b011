"""The gate for a trainer and an engine: after a synchronization of weights, both give the same log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_check.diagnosis.report import Report
from mgpu_check.errors import ScalingMismatch
from mgpu_check.gates.comparison.coverage import check_unjudged
from mgpu_check.gates.gate_arguments import RanksFixture, definition_of, naming_unusable, noting, world_sizes_of
from mgpu_check.processes.scratch import Scratch

if TYPE_CHECKING:
    import torch

    from mgpu_check.engine.rank_side.rank import Rank

_GATE = "assert_engines_agree"


def assert_engines_agree(
    ranks: RanksFixture,
    trainer: Callable[[Rank], Any],
    engine: Callable[[Rank], Any],
    synchronize: Callable[[Any, Any, Rank], Any],
    *,
    prompts: int | Callable[[], Sequence[torch.Tensor]],
    names: Mapping[str, str | Sequence[str]] | None = None,
    unjudged: Mapping[str, str] | None = None,
    bitwise: bool = False,
    routing: float = 0.0,
    dtype: torch.dtype | None = None,
    world_sizes: Iterable[int] | None = None,
) -> None:
    """Assert that the engine that samples is the model that trains, after its weights were synchronized.

    Each rank calls ``trainer(rank)`` and ``engine(rank)``. The result is a module, or an object with the methods below;
    or None on ranks without a part of that side. The gate puts other values into the engine, changes the weights of the
    trainer, and calls ``synchronize(trainer, engine, rank)`` on all ranks; then it changes the trainer and synchronizes
    again. After each synchronization both sides compute log-probabilities of the same prompts.

    - **Weights.** Each row of the engine's tensors must be one of the trainer's, converted to the engine's dtype:
      not that from before, not one of the former synchronization, and not rounded to a narrower dtype. Rows are found
      by their values, whole or in parts. So names, fused tensors and another division over ranks need no description.
      Rows that the trainer does not have, such as of quantized or merged weights, are judged by log-probabilities.
    - **Log-probabilities** of each prompt alone, over the whole vocabulary if both sides give it. They may differ by
      rounding in the dtypes of the tensors. How far rounding moves them is measured (Monte Carlo arithmetic: D. S.
      Parker, UCLA CSD-970002, 1997).
    - **Prompts** that are padded on the right or on the left, given in pieces, or given again: each side must give the
      log-probabilities of the prompts alone.
    - **Repetition.** Another synchronization of the same weights changes nothing.

    The methods of a side:

    - ``log_probabilities(tokens)`` for int64 tokens ``[batch, length]`` returns ``[batch, length, vocabulary]``, where
      entry t is the distribution of token t + 1; or ``[batch, length - 1]``, where entry t is the log-probability of
      token t + 1; or None on a rank that has no output. With a parameter `mask` (bool ``[batch, length]``, False for
      padding) it is also called with padded prompts; with `pieces` (lengths that add up to the length) it computes one
      piece after the other, with its cache.
    - ``experts(tokens)``, optional, returns the experts of each token: integers ``[batch, length, layers, k]``. The
      experts of both sides must be the same.
    - ``tensors()`` returns the tensors of this rank by name: those that compute, not copies. Optional for the engine.
    - ``step()`` changes the trainer's weights, such as by an optimizer step. Optional: the gate changes `tensors()`.

    A module is called as those of transformers are. Its tensors are those of its ``state_dict()``, and its output, or
    the `logits` of its output, give its log-probabilities. Padded prompts need a parameter `attention_mask` of its
    forward method, and pieces `cache` or `past_key_values`.

    Args:
        ranks: the fixture.
        trainer: makes the trainer on a rank. Seeds are the same on all ranks.
        engine: makes the engine on a rank.
        synchronize: copies the weights of the trainer to the engine.
        prompts: the size of the vocabulary, for drawn prompts of 12, 7 and 10 tokens; or a function that returns a list
            of prompts, each a 1-D int64 tensor.
        names: the trainer's tensors that a tensor of the engine holds, for patterns of the engine's names:
            ``{"layers.*.qkv.weight": ["layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight"]}``. A row of any
            other tensor is then an error. Tensors that are not given hold the tensor of their name.
        unjudged: tensors of the engine that are not synchronized: a mapping from patterns of names to reasons.
        bitwise: whether log-probabilities must be equal bit for bit.
        routing: the share of tokens that may go to other experts, from 0 to below 1. From such a token on,
            log-probabilities are not compared.
        dtype: the dtype that an engine without `tensors` computes in, such as ``torch.bfloat16``, if it is not the
            trainer's.
        world_sizes: world sizes to check; default the powers of two from 2 on, and ``ranks.size``.

    Raises:
        ScalingMismatch: the two sides differ. The message says what makes them equal, if something does. ``.ranks``
            are the ranks of the tensors or log-probabilities that differ.
        ValueError: an argument is wrong, or the sides cannot be compared.
    """
    functions = {"trainer": trainer, "engine": engine, "synchronize": synchronize}
    for name, value in functions.items():
        if not callable(value):
            example = "synchronize(trainer, engine, rank)" if name == "synchronize" else f"{name}(rank)"
            raise ValueError(f"{_GATE}: {name}={value!r:.80} is not a function; give one, as in {example}")
    is_size = isinstance(prompts, int) and not isinstance(prompts, bool) and prompts >= 2
    if not callable(prompts) and not is_size:
        raise ValueError(
            f"{_GATE}: prompts={prompts!r:.80}; give the size of the vocabulary, an int of at least 2, or a function "
            "that returns a list of 1-D tensors"
        )
    if type(bitwise) is not bool:
        raise ValueError(f"{_GATE}: bitwise={bitwise!r}; give True or False")
    if not isinstance(routing, int | float) or not 0 <= routing < 1:
        raise ValueError(f"{_GATE}: routing={routing!r}; give the share of tokens that may part, from 0 to below 1")
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ValueError(f"{_GATE}: dtype={dtype!r}; give a floating-point dtype, such as torch.bfloat16")
    sources = _sources(names)
    reasons = check_unjudged(_GATE, unjudged)
    # Here, because they import torch, which this process may do without until it has a gate to run.
    from mgpu_check.gates.comparison.engine_agreement import compare_engines
    from mgpu_check.gates.run.engines import Engines, exercise

    engines = Engines(trainer, engine, synchronize, prompts, reasons, bitwise, routing, dtype)
    for size in world_sizes_of(ranks, world_sizes):
        doing = noting(f"trainer and engine at world size {size}")
        with Scratch.new("engines") as directory, naming_unusable(_GATE), doing:
            ranks.run(exercise, engines, directory, size=size)
            verdict = ranks.run(compare_engines, engines, sources, directory, size, size=1)[0]
        if (disagreement := verdict.disagreement) is not None:
            case = {"world size": size}
            report = Report(disagreement.headline, case, known=disagreement.facts, place=definition_of(synchronize))
            raise ScalingMismatch(str(report), ranks=disagreement.ranks, site=report.site)
        for line in verdict.not_compared:
            ranks._not_seen(_GATE, line)


def _sources(names: Mapping[str, str | Sequence[str]] | None) -> dict[str, list[str]]:
    example = 'give a mapping from names of the engine to names of the trainer, such as {"layers.*.qkv.weight": '
    example += '["layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight"]}'
    if names is not None and not isinstance(names, Mapping):
        raise ValueError(f"{_GATE}: names={names!r:.80}; {example}")
    sources = {}
    for name, given in (names or {}).items():
        several = [given] if isinstance(given, str) else list(given)
        if not isinstance(name, str) or not several or not all(isinstance(source, str) for source in several):
            raise ValueError(f"{_GATE}: names has {name!r}: {given!r:.80}; {example}")
        if any(source.count("*") > min(name.count("*"), 1) for source in several) or name.count("*") > 1:
            raise ValueError(f"{_GATE}: names has {name!r}: {given!r:.80}; give one * at most, the same in both")
        sources[name] = several
    return sources
