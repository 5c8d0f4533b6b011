"""The two sides of `assert_engines_agree` on a rank: change weights, synchronize, ask for log-probabilities.

Imports torch: for ranks only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.engine.rank_side.worker import pause
from mgpu_check.gates.gate_arguments import Unusable
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.numerics.reduction import unit_roundoff
from mgpu_check.numerics.steps import PAIRS, deviations, envelopes, full_precision
from mgpu_check.torch_hooks.nested import tensors_of
from mgpu_check.torch_hooks.switches import seed_everything
from mgpu_check.torch_hooks.tensors import local_part, plain_copy

SIDES = ("trainer", "engine")
LAYOUTS = {
    "again": "a second call with the same prompts",
    "in pieces": "prompts that are given in pieces, with the cache of the first piece",
    "padded right": "prompts of different lengths, padded on the right",
    "padded left": "prompts of different lengths, padded on the left",
}
"""Other ways to ask for the log-probabilities of the same prompts. Each must give those of each prompt alone."""

OUTPUT, EXPERTS = "log-probabilities", "experts"
_SEED = 11
_LENGTHS = (12, 7, 10)  # tokens of the drawn prompts
_COMMON = 4  # tokens that the first and the last prompt have in common, for caches of prefixes
_CHANGE = 0.25  # size of a change of weights, as a fraction of the largest element
_OF_ZEROS = 0.02  # size of a change of tensors that are zero

Prompts = int | Callable[[], Sequence[torch.Tensor]]
Answers = dict[str, torch.Tensor]
"""The values of a side for one prompt: `OUTPUT`, perhaps `EXPERTS`, and the outputs of its modules by name."""


@dataclass(frozen=True)
class Engines:
    """The functions of `assert_engines_agree`. The gate sends them to the ranks."""

    trainer: Callable[[Rank], Any]
    engine: Callable[[Rank], Any]
    synchronize: Callable[[Any, Any, Rank], Any]
    prompts: Prompts
    unjudged: Mapping[str, str]
    bitwise: bool
    routing: float  # share of the tokens that may go to other experts
    dtype: torch.dtype | None  # of an engine without tensors, if it is narrower than the trainer's

    def judges(self, name: str) -> bool:
        """Return whether a tensor of the engine, by its name, must be synchronized."""
        return not any(fnmatchcase(name, pattern) for pattern in self.unjudged)


class Side:
    """The trainer or the engine on this rank, as a module, or as an object with `log_probabilities`."""

    def __init__(self, owner: Any, label: str, rank: Rank) -> None:
        self.owner, self.label, self.device = owner, label, rank.device
        self.is_module = isinstance(owner, nn.Module)
        function = owner.forward if self.is_module else getattr(owner, "log_probabilities", None)
        if owner is not None and function is None:
            raise Unusable(
                f"{label}(rank) returned a {type(owner).__name__} without log_probabilities(tokens); return a module, "
                f"an object with that method, or None on ranks without a part of the {label}"
            )
        self.parameters = set() if function is None else set(inspect.signature(function).parameters)

    @property
    def layouts(self) -> list[str]:
        """The ways to ask for log-probabilities that this side has."""
        padded = ("attention_mask" if self.is_module else "mask") in self.parameters
        in_pieces = bool(self._cache) if self.is_module else "pieces" in self.parameters
        return ["again", *["in pieces"] * in_pieces, *["padded right", "padded left"] * padded]

    @property
    def _cache(self) -> str:
        """The parameter of a module that takes the cache of the tokens before; "" if it has none."""
        return next((name for name in ("cache", "past_key_values") if name in self.parameters), "")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of this rank by name; of a DTensor, its local part. Empty if the side shows none."""
        if self.is_module:
            named = self.owner.state_dict()
        elif hasattr(self.owner, "tensors"):
            named = dict(self.owner.tensors())
        else:
            return {}
        return {name: local_part(value) for name, value in named.items() if isinstance(value, torch.Tensor)}

    def log_probabilities(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, pieces: Sequence[int] = ()
    ) -> torch.Tensor | None:
        """Return log-probabilities of ``[batch, length]`` tokens, in float64 on the CPU; None if this rank has none.

        They are ``[batch, length, vocabulary]``, entry t the distribution of token t + 1; or ``[batch, length - 1]``,
        entry t the log-probability of token t + 1.
        """
        tokens = tokens.to(self.device)
        mask = None if mask is None else mask.to(self.device)
        output: Any
        if self.is_module:
            output = self._of_module(tokens, mask, pieces)
        else:
            options = {"mask": mask} if mask is not None else {"pieces": list(pieces)} if pieces else {}
            output = self.owner.log_probabilities(tokens, **options)
        if output is None:
            return None
        if not isinstance(output, torch.Tensor) or output.shape[:1] != tokens.shape[:1] or output.dim() not in (2, 3):
            shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            raise Unusable(
                f"log_probabilities of the {self.label} returned {shape} for tokens of {tuple(tokens.shape)}; return "
                "[batch, length, vocabulary], or [batch, length - 1] for the tokens themselves"
            )
        return plain_copy(output).double()

    def _of_module(self, tokens: torch.Tensor, mask: torch.Tensor | None, pieces: Sequence[int]) -> torch.Tensor:
        if not pieces:
            options: dict[str, Any] = {}
            if mask is not None:
                options["attention_mask"] = mask.long()
                if "position_ids" in self.parameters:  # as in generation: the first token has position 0
                    options["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
            logits = _logits(self.owner(tokens, **options))
        else:
            cache, parts = None, []
            for piece in tokens.split(list(pieces), dim=1):
                output = self.owner(piece, **{self._cache: cache}, use_cache=True)
                cache = getattr(output, self._cache)
                parts.append(plain_copy(_logits(output)))
            logits = torch.cat(parts, dim=1)
        return plain_copy(logits).float().log_softmax(-1)

    def experts(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return the experts of each token, ``[length, layers, k]``, in ascending order; None if the side has none."""
        if self.is_module or not callable(getattr(self.owner, "experts", None)):
            return None
        chosen = self.owner.experts(tokens[None].to(self.device))
        if chosen is not None and (chosen.is_floating_point() or chosen.dim() != 4 or chosen.shape[1] != len(tokens)):
            raise Unusable(
                f"experts of the {self.label} returned {tuple(chosen.shape)} of {chosen.dtype} for tokens of "
                f"(1, {len(tokens)}); return integers, [batch, length, layers, experts of a token]"
            )
        return None if chosen is None else plain_copy(chosen)[0].long().sort(-1).values

    def step(self) -> None:
        """Change the weights of the trainer: by its method `step`, or in place."""
        before = _copies(self.tensors())
        own = getattr(self.owner, "step", None)
        if not before and own is None:
            raise Unusable(f"the {self.label} has neither tensors() nor step(), so its weights cannot be changed")
        if own is not None:
            with torch.enable_grad():
                own()
        else:
            change(self.tensors(), self.label)
        if before and all(torch.equal(plain_copy(tensor), before[name]) for name, tensor in self.tensors().items()):
            reason = "its step() changes none of them" if own is not None else "its tensors() returns copies"
            raise Unusable(
                f"the weights of the {self.label} stay as they are: {reason}; return the tensors that compute, and let "
                "step() change them, if there is one"
            )


def change(tensors: Mapping[str, torch.Tensor], label: str) -> None:
    """Add random numbers to the floating-point tensors, the same to replicas on other ranks."""
    memory: set[int] = set()
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.data_ptr() in memory or not tensor.numel():
            continue
        memory.add(tensor.data_ptr())
        value = plain_copy(tensor).float()
        generator = torch.Generator().manual_seed(zlib.crc32(f"{label}.{name}".encode()))
        size = _CHANGE * float(value.abs().max()) or _OF_ZEROS
        moved = value + size * (2 * torch.rand(value.shape, generator=generator) - 1)
        tensor.copy_(moved.to(tensor.dtype))


def exercise(engines: Engines, directory: Path, rank: Rank) -> None:
    """Synchronize weights twice, ask both sides for log-probabilities, and save what is compared in `directory`."""
    seed_everything(_SEED)
    trainer, engine = Side(engines.trainer(rank), "trainer", rank), Side(engines.engine(rank), "engine", rank)
    sides = [side for side in (trainer, engine) if side.owner is not None]
    saved: dict[str, Any] = {"prompts": _prompts(engines)}
    with torch.no_grad(), full_precision():
        for version in ("old", "new"):
            if version == "old":
                judged = {name: tensor for name, tensor in engine.tensors().items() if engines.judges(name)}
                change(judged, "engine")
                saved["filled"] = _copies(engine.tensors())
            if trainer.owner is not None:
                trainer.step()
            engines.synchronize(trainer.owner, engine.owner, rank)
            saved[version] = {side.label: _copies(side.tensors()) for side in sides}
            saved[f"{version} answers"] = {side.label: _alone(side, saved["prompts"]) for side in sides}
            pause(f"synchronization of {version} weights", last=False)
        saved["tolerances"] = {}
        for side in [] if engines.bitwise else sides:
            narrow = engines.dtype if side is trainer else None
            of_side = saved["new answers"][side.label]
            saved["tolerances"][side.label] = _tolerances(side, of_side, saved["prompts"], narrow)
        saved["layouts"] = {side.label: _in_layouts(side, saved["prompts"]) for side in sides}
        engines.synchronize(trainer.owner, engine.owner, rank)
        saved["repeated"] = _copies(engine.tensors())
    directory.mkdir(exist_ok=True)
    torch.save(saved, directory / f"{rank.index}.pt")


def _prompts(engines: Engines) -> list[torch.Tensor]:
    if callable(engines.prompts):
        prompts = [torch.as_tensor(prompt) for prompt in engines.prompts()]
        if not prompts or any(prompt.dim() != 1 or len(prompt) < 2 for prompt in prompts):
            raise Unusable("prompts() must return a list of one or more 1-D tensors of two or more tokens")
        return prompts
    generator = torch.Generator().manual_seed(_SEED)
    prompts = [torch.randint(engines.prompts, (length,), generator=generator) for length in _LENGTHS]
    prompts[-1][:_COMMON] = prompts[0][:_COMMON]
    return prompts


def _alone(side: Side, prompts: Sequence[torch.Tensor]) -> list[Answers]:
    """Return what a side computes for each prompt by itself."""
    answers = []
    for prompt in prompts:
        modules: Answers = {}
        with contextlib.ExitStack() as hooks:
            for name, module in side.owner.named_modules() if side.is_module else ():
                if name:
                    hooks.enter_context(module.register_forward_hook(functools.partial(_keep, modules, name)))
            output = side.log_probabilities(prompt[None])
        if (chosen := side.experts(prompt)) is not None:
            modules[EXPERTS] = chosen
        answers.append(modules if output is None else modules | {OUTPUT: output[0]})
    return answers


def _keep(modules: Answers, name: str, module: nn.Module, args: Any, output: Any) -> None:
    first = next(iter(tensors_of(output)), None)
    if first is not None and first.is_floating_point() and name not in modules:
        modules[name] = plain_copy(local_part(first)).double()


def _in_layouts(side: Side, prompts: Sequence[torch.Tensor]) -> dict[str, list[Answers]]:
    """Return the log-probabilities of each prompt in each of the `LAYOUTS` that a side has, without the padding.

    "right, unmasked" and "left, unmasked" are controls: padded, with a mask that hides nothing.
    """
    answers = {}
    for layout in side.layouts:
        if layout in ("again", "in pieces"):
            answers[layout] = [{OUTPUT: output} for output in _each(side, prompts, halved=layout == "in pieces")]
        else:
            edge = layout.removeprefix("padded ")
            answers[layout] = _padded(side, prompts, edge, masked=True)
            answers[f"{edge}, unmasked"] = _padded(side, prompts, edge, masked=False)
    return answers


def _each(side: Side, prompts: Sequence[torch.Tensor], *, halved: bool) -> Iterator[torch.Tensor]:
    for prompt in prompts:
        half = len(prompt) // 2
        output = side.log_probabilities(prompt[None], pieces=(half, len(prompt) - half) if halved else ())
        if output is not None:
            yield output[0]


def _padded(side: Side, prompts: Sequence[torch.Tensor], edge: str, *, masked: bool) -> list[Answers]:
    longest = max(map(len, prompts))
    tokens, mask = torch.zeros(len(prompts), longest, dtype=torch.long), torch.zeros(len(prompts), longest).bool()
    starts = [0 if edge == "right" else longest - len(prompt) for prompt in prompts]
    for row, (start, prompt) in enumerate(zip(starts, prompts, strict=True)):
        tokens[row, start : start + len(prompt)] = prompt
        mask[row, start : start + len(prompt)] = True
    output = side.log_probabilities(tokens, mask if masked else torch.ones_like(mask))
    if output is None:
        return []
    of_tokens = output.dim() == 2  # which have one entry less
    return [
        {OUTPUT: row[start : start + len(prompt) - of_tokens]}
        for row, start, prompt in zip(output, starts, prompts, strict=True)
    ]


def roundoff_of(tensors: Mapping[str, torch.Tensor]) -> float:
    """Return the unit roundoff of the coarsest floating-point dtype; 0 without tensors of one."""
    return max((unit_roundoff(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()), default=0.0)


def _tolerances(
    side: Side, answers: Sequence[Answers], prompts: Sequence[torch.Tensor], narrow: torch.dtype | None
) -> list[dict[str, torch.Tensor]]:
    """Measure how far rounding moves the answers of a side, by Monte Carlo arithmetic in its own dtypes.

    `narrow`: the dtype of an engine whose own rounding cannot be measured. Then the side runs under autocast to it.
    """
    usual = [{name: value for name, value in answer.items() if name != EXPERTS} for answer in answers]
    quantile = deviations(sum(value.numel() for answer in usual for value in answer.values()))
    # A narrow dtype is not linear over several roundoffs: perturb by one there, and scale what that moves.
    is_narrow = narrow is not None or roundoff_of(side.tensors()) >= unit_roundoff(torch.float16)
    spread = 1.0 if is_narrow else quantile
    kept, runs = _copies(side.tensors()), []
    for pair in range(PAIRS):
        for sign in (1, -1):
            generator = torch.Generator().manual_seed(_SEED + pair)
            autocast = torch.autocast(side.device.type, narrow or torch.bfloat16, enabled=narrow is not None)
            with autocast, Perturbed(sign * spread, generator, unit_roundoff(torch.float64), counts=True):
                # Asked for anew: the root of `fully_shard` stays gathered after a call, until its state_dict is taken.
                for tensor in side.tensors().values():
                    if tensor.is_floating_point():
                        tensor.copy_(tensor.clone())
                runs.append(_alone(side, prompts))
            for name, tensor in side.tensors().items():
                tensor.copy_(kept[name])
    moved = [envelopes(answer, [run[number] for run in runs]) for number, answer in enumerate(usual)]
    return [{name: value * quantile / spread for name, value in envelope.items()} for envelope in moved]


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: plain_copy(tensor) for name, tensor in tensors.items()}


def _logits(output: Any) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise Unusable(
            f"a module returned a {type(output).__name__} without logits; wrap it in an object with "
            "log_probabilities(tokens)"
        )
    return logits
