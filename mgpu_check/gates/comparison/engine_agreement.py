"""Compare a trainer and an engine by what ranks have saved: their weights, and their log-probabilities.

Imports torch: for ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from mgpu_check.gates.run.engines import EXPERTS, LAYOUTS, OUTPUT, SIDES, Answers, Engines, roundoff_of
from mgpu_check.numerics.differences import difference, show
from mgpu_check.processes.rank_lists import few, named
from mgpu_check.torch_hooks.tensors import bytes_of, digest_of, name_of

_LEAST_BYTES = 8  # of a piece of a row: two numbers of 16 bits are the same by chance
_SHOWN = 3
_NARROW = (torch.bfloat16, torch.float16)
_ROOM = 1.5  # a perturbation moves each result by a whole roundoff, and rounding to nearest by 0.6 on average (RMS)
_Output = torch.Tensor


@dataclass(frozen=True)
class Disagreement:
    """A difference between trainer and engine: a line, the facts that explain it, and the ranks."""

    headline: str
    facts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    disagreement: Disagreement | None
    not_compared: tuple[str, ...] = ()


def compare_engines(engines: Engines, names: Mapping[str, Sequence[str]], directory: Path, size: int) -> Verdict:
    """Compare what `size` ranks have saved. Called on one rank.

    `names`: for patterns of the engine's names, the trainer's names whose values they hold.
    """
    saved = [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(size)]
    weights = _Weights(engines, names, saved)
    answers = _Answers(saved, engines)
    disagreement = (
        weights.unsynchronized()
        or answers.of_replicas()
        or answers.of_experts()
        or answers.of_sides(weights.facts)
        or answers.in_layouts()
        or weights.changed_by_repetition()
    )
    return Verdict(disagreement, (*weights.not_compared(), *answers.not_compared()))


class _Weights:
    """The engine's tensors, each row of which is looked up among the rows of the trainer's tensors."""

    def __init__(self, engines: Engines, names: Mapping[str, Sequence[str]], saved: Sequence[Mapping[str, Any]]):
        self.judges, self.saved = engines.judges, saved
        self.trained = {version: [own[version].get("trainer", {}) for own in saved] for version in ("old", "new")}
        self.of_trainer = list(dict.fromkeys(name for tensors in self.trained["new"] for name in tensors))
        self.sources: dict[tuple[int, str], list[frozenset[str]]] = {}
        self.expected: dict[str, list[str]] = {}
        self._rows: dict[tuple[str, torch.dtype, torch.dtype, int], dict[bytes, frozenset[str]]] = {}
        for rank, name, tensor in self._synchronized():
            self.sources[rank, name] = self._sources("new", tensor, tensor.dtype)
            self.expected[name] = _expected(name, names, self.of_trainer)

    def unsynchronized(self) -> Disagreement | None:
        """Return the tensors of the engine that hold old, rounded or other values after the synchronization."""
        tensors_by_content: dict[str, dict[str, list[int]]] = {}  # content -> names of tensors -> their ranks
        for rank, name, tensor in self._synchronized():
            if not all(self.sources[rank, name]) and (content := self._content(rank, name, tensor)):
                tensors_by_content.setdefault(content, {}).setdefault(name, []).append(rank)
        if tensors_by_content:
            lines = [
                f"{few(list(ranks_of), _SHOWN)} of the engine on "
                f"{named({rank for ranks in ranks_of.values() for rank in ranks})} {content}"
                for content, ranks_of in tensors_by_content.items()
            ]
            ranks = {rank for ranks_of in tensors_by_content.values() for ranks in ranks_of.values() for rank in ranks}
            return Disagreement(
                f"after the synchronization, {lines[0]}", tuple(lines[1 : 1 + _SHOWN]), tuple(sorted(ranks))
            )
        for name, sources in self.expected.items():
            for rank in range(len(self.saved)):
                if sources and (odd := self._odd(rank, name, sources)):
                    return Disagreement(f"{name} of the engine on rank {rank} {odd}", (), (rank,))
        return None

    def _content(self, rank: int, name: str, tensor: torch.Tensor) -> str:
        """Return the values in a tensor that are not the trainer's new ones, in words; "" if they are unknown."""
        missing = torch.tensor([not source for source in self.sources[rank, name]])
        filled = self.saved[rank]["filled"].get(name)
        pieces = tensor.reshape(len(missing), -1)
        if filled is not None and filled.shape == tensor.shape and tensor.is_floating_point():
            kept = (pieces == filled.reshape(len(missing), -1)).all(1)
            if bool(kept[missing].any()):
                return _share(kept & missing, "the values that it had before")
        old = torch.tensor([bool(source) for source in self._sources("old", tensor, tensor.dtype)])
        if len(old) == len(missing) and bool(old[missing].any()):
            return _share(old & missing, "the trainer's weights of the synchronization before")
        wider = [dtype for dtype in _NARROW if tensor.is_floating_point() and dtype.itemsize < tensor.itemsize]
        for dtype in wider:
            if all(self._sources("new", tensor, dtype)):
                return f"hold the trainer's weights rounded to {name_of(dtype)}, in {name_of(tensor.dtype)}"
        return ""

    def facts(self) -> list[str]:
        """Return what is odd about the weights, for log-probabilities that differ."""
        facts = []
        arrived = {name for sources in self.sources.values() for source in sources for name in source}
        if lost := [name for name in self.of_trainer if name not in arrived and self.sources]:
            facts.append(
                f"{few(lost, _SHOWN)} of the trainer {'arrives' if len(lost) == 1 else 'arrive'} nowhere whole"
            )
        for (rank, name), sources in self.sources.items():
            if not all(sources):
                count = f"{sum(not source for source in sources)} of {len(sources)}"
                facts.append(f"{name} of the engine on rank {rank} has {count} rows that no tensor of the trainer has")
            elif name in self.of_trainer and (odd := self._odd(rank, name, [name])):
                facts.append(f"{name} of the engine on rank {rank} {odd}")
            order = list(dict.fromkeys(source for piece in sources for source in sorted(piece)))
            expected = self.expected[name]
            if len(expected) > 1 and order != expected and sorted(order) == sorted(expected):
                facts.append(f"{name} of the engine on rank {rank} holds {', '.join(order)} in this order")
        facts += [fact for name in self.of_trainer if (fact := self._partly(name))]
        return facts[:_SHOWN]

    def _partly(self, name: str) -> str:
        """Return that only some rows of a trainer's tensor arrive; "" if all do, or none."""
        rows = {row for own in self.trained["new"] if name in own for row in _rows(own[name])}
        tensors = [tensor for own in self.saved for tensor in own["new"].get("engine", {}).values()]
        count = len(rows.intersection(row for tensor in tensors for row in _rows(tensor)))
        return f"{count} of {len(rows)} rows of {name} of the trainer arrive" if 0 < count < len(rows) else ""

    def changed_by_repetition(self) -> Disagreement | None:
        """Return the tensors that a second synchronization of the same weights has changed."""
        for rank, own in enumerate(self.saved):
            before = own["new"].get("engine", {})
            changed = [
                name
                for name, tensor in own["repeated"].items()
                if name in before and digest_of(before[name]) != digest_of(tensor)
            ]
            if changed:
                tensors = f"{few(changed, _SHOWN)} of the engine on rank {rank}"
                return Disagreement(f"a second synchronization of the same weights changes {tensors}", (), (rank,))
        return None

    def not_compared(self) -> Iterator[str]:
        if not self.sources:
            yield "weights: the engine has no tensors; its log-probabilities alone show which weights it has"
        if derived := {name: None for (_, name), sources in self.sources.items() if not all(sources)}:
            yield f"{few(list(derived))} of the engine: the trainer has no such rows; log-probabilities agree"

    def _odd(self, rank: int, name: str, sources: Sequence[str]) -> str:
        pieces = self.sources.get((rank, name), [])
        others = [piece for piece in pieces if piece and not piece & set(sources)]
        return f"holds rows of {few(sorted(min(others)), 1)}, and should hold {few(sources, _SHOWN)}" if others else ""

    def _synchronized(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        for rank, own in enumerate(self.saved):
            for name, tensor in own["new"].get("engine", {}).items():
                if tensor.numel() and self.judges(name):
                    yield rank, name, tensor

    def _sources(self, version: str, tensor: torch.Tensor, through: torch.dtype) -> list[frozenset[str]]:
        """Return the trainer's tensors that have each piece of the rows of a tensor, in the widest pieces that fit.

        `through`: the dtype that the trainer's values are rounded to first.
        """
        width = tensor.shape[-1] if tensor.dim() else 1
        best: list[frozenset[str]] = [frozenset()]
        for pieces in (width // count for count in range(1, width + 1) if width % count == 0):
            if pieces < width and pieces * tensor.element_size() < _LEAST_BYTES:
                break
            rows = self._index(version, through, tensor.dtype, pieces)
            sources = [rows.get(piece, frozenset()) for piece in _pieces(tensor, pieces)]
            if all(sources):
                return sources
            if best == [frozenset()] or sum(map(bool, sources)) / len(sources) > sum(map(bool, best)) / len(best):
                best = sources
        return best

    def _index(self, version: str, through: torch.dtype, dtype: torch.dtype, width: int) -> dict[bytes, frozenset[str]]:
        key = version, through, dtype, width
        if key not in self._rows:
            rows: dict[bytes, frozenset[str]] = {}
            for tensors in self.trained[version]:
                for name, tensor in tensors.items():
                    same = tensor.is_floating_point() == dtype.is_floating_point
                    value = tensor.to(through).to(dtype) if same else tensor
                    for view in (value, value.mT) if value.dim() > 1 else (value,):
                        if same and view.numel() and (view.shape[-1] if view.dim() else 1) % width == 0:
                            for piece in _pieces(view, width):
                                rows[piece] = rows.get(piece, frozenset()) | {name}
            self._rows[key] = rows
        return self._rows[key]


class _Answers:
    """The log-probabilities of both sides, and how far rounding may move them."""

    def __init__(self, saved: Sequence[Mapping[str, Any]], engines: Engines) -> None:
        self.saved, self.bitwise, self.routing = saved, engines.bitwise, engines.routing
        self.is_opaque = engines.dtype is None and not any(own["new"].get("engine") for own in saved)
        self.owners = {
            label: [rank for rank, own in enumerate(saved) if _has_output(own["new answers"].get(label, []))]
            for label in SIDES
        }

    def of_replicas(self) -> Disagreement | None:
        """Return a side whose ranks give different log-probabilities, or none that can be compared."""
        for label, ranks in self.owners.items():
            if not ranks:
                return Disagreement(f"no rank of the {label} returned log-probabilities")
            base = self._outputs(label)
            if any(bool(output.isnan().any()) for output in base):
                return Disagreement(f"the {label} returned NaN on rank {ranks[0]}", (), (ranks[0],))
            for rank in ranks[1:]:
                outputs = [answers[OUTPUT] for answers in self.saved[rank]["new answers"][label]]
                if detail := self._apart(outputs, base, self._tolerance(label)):
                    return Disagreement(
                        f"ranks of the {label} differ: rank {rank} from rank {ranks[0]}: {detail}", (), (rank,)
                    )
        return None

    def of_experts(self) -> Disagreement | None:
        """Return that more tokens than allowed go to other experts, with the first of them."""
        parted = [(number, *place) for number, rows in enumerate(self._parted()) for place in rows.nonzero().tolist()]
        total = sum(len(prompt) for prompt in self.saved[0]["prompts"])
        tokens = len({(number, position) for number, position, _ in parted})
        if tokens <= self.routing * total:
            return None
        number, position, layer = min(parted, key=lambda place: place[2])
        engine, trainer = (
            self.saved[self.owners[label][0]]["new answers"][label][number][EXPERTS][position, layer].tolist()
            for label in ("engine", "trainer")
        )
        return Disagreement(
            f"the engine routes {tokens} of {total} tokens to other experts than the trainer: first in layer "
            f"{layer}, at position {position} of prompt {number + 1}: {engine} for {trainer}",
            ranks=tuple(self.owners["engine"]),
        )

    def _parted(self) -> list[torch.Tensor]:
        """Return which tokens of each prompt go to other experts, ``[length, layers]``; empty if one side says none."""
        sides = [self.saved[self.owners[label][0]]["new answers"][label] for label in ("engine", "trainer")]
        if not all(EXPERTS in answers for of_side in sides for answers in of_side):
            return []
        return [(own[EXPERTS] != other[EXPERTS]).any(-1) for own, other in zip(*sides, strict=True)]

    def of_sides(self, facts_of_weights: Callable[[], list[str]]) -> Disagreement | None:
        """Return how the engine's log-probabilities differ from the trainer's, each prompt alone, and why."""
        engine, trainer = self._on_common_terms(self._outputs("engine"), self._outputs("trainer"))
        allowed = self._allowed(trainer)
        detail = self._apart(engine, trainer, allowed)
        if not detail:
            return None
        ranks = tuple(self.owners["engine"])
        facts = [*self._explanations(engine, trainer, allowed), *facts_of_weights(), *self._first_module()]
        if self.is_opaque:
            facts.append("the engine has no tensors, so its dtype is unknown: give dtype= if it is narrower")
        return Disagreement(f"the engine's log-probabilities differ from the trainer's: {detail}", tuple(facts), ranks)

    def in_layouts(self) -> Disagreement | None:
        """Return a side that gives other log-probabilities if prompts are padded, in pieces, or asked for again."""
        for label, ranks in self.owners.items():
            layouts = self.saved[ranks[0]]["layouts"][label]
            base, allowed = self._outputs(label), self._tolerance(label)
            for layout, words in LAYOUTS.items():
                outputs = [answers[OUTPUT] for answers in layouts.get(layout, [])]
                if not outputs or not (detail := self._apart(outputs, base, allowed)):
                    continue
                facts = []
                if layout.startswith("padded"):
                    unmasked = [answers[OUTPUT] for answers in layouts[f"{layout.removeprefix('padded ')}, unmasked"]]
                    if not self._apart(outputs, unmasked, allowed):
                        facts = ["the mask has no effect: without it the values are the same"]
                return Disagreement(
                    f"the {label} gives other log-probabilities for {words}: {detail}", tuple(facts), tuple(ranks)
                )
        return None

    def not_compared(self) -> Iterator[str]:
        if all(self.owners.values()):
            trainer = self._outputs("trainer")
            if not self._apart(self._outputs("trainer", "old"), trainer, self._tolerance("trainer")):
                yield "old weights: they give the same log-probabilities within the tolerance"
            for label, ranks in self.owners.items():
                tried = self.saved[ranks[0]]["layouts"][label]
                if (
                    any(EXPERTS in answers for answers in self.saved[ranks[0]]["new answers"][label])
                    and not self._parted()
                ):
                    yield "experts: only one side says them"
                # Only engines have caches.
                expected = [layout for layout in LAYOUTS if layout != "in pieces" or label == "engine"]
                if missing := [layout for layout in expected if layout not in tried]:
                    yield f"prompts {', '.join(missing)}: log_probabilities of the {label} does not take them"

    def _outputs(self, label: str, version: str = "new") -> list[_Output]:
        rank = self.owners[label][0]
        return [answers[OUTPUT] for answers in self.saved[rank][f"{version} answers"][label]]

    def _tolerance(self, label: str) -> list[_Output]:
        if self.bitwise:
            return [torch.zeros_like(output) for output in self._outputs(label)]
        return [_ROOM * answers[OUTPUT] for answers in self.saved[self.owners[label][0]]["tolerances"][label]]

    def _allowed(self, like: Sequence[_Output]) -> list[_Output]:
        """Return how far the engine may differ: as far as rounding moves the trainer, or itself in a narrower dtype.

        In the trainer's dtype its own rounding does not count: if it rounded more coarsely, it would allow itself more.
        """
        tensors = {label: self.saved[ranks[0]]["new"].get(label, {}) for label, ranks in self.owners.items()}
        coarsest = {label: roundoff_of(of_side) for label, of_side in tensors.items()}
        counted = SIDES if coarsest["engine"] > coarsest["trainer"] else ("trainer",)
        allowed = [torch.zeros_like(output) for output in like]
        for label in counted:
            for of_prompt, tolerance in zip(allowed, self._tolerance(label), strict=True):
                reduced = tolerance.amax(1) if tolerance.dim() > of_prompt.dim() else tolerance
                of_prompt += reduced[tuple(slice(length) for length in of_prompt.shape)]
        for of_prompt, rows in zip(allowed, self._parted(), strict=False):
            if bool(rows.any()):  # all later tokens see one that was routed elsewhere
                of_prompt[int(rows.any(1).int().argmax()) :] = torch.inf
        return allowed

    def _on_common_terms(self, engine: list[_Output], trainer: list[_Output]) -> tuple[list[_Output], list[_Output]]:
        """Return the log-probabilities of the tokens of prompts if one side has only those; else of common tokens."""
        prompts = self.saved[0]["prompts"]
        if engine[0].dim() != trainer[0].dim():
            engine, trainer = ([_of_tokens(output, prompt) for output, prompt in zip(outputs, prompts, strict=True)]
                               for outputs in (engine, trainer))  # fmt: skip
        elif engine[0].dim() == 2:  # vocabularies may be padded
            common = min(engine[0].shape[-1], trainer[0].shape[-1])
            engine, trainer = ([output[:, :common] for output in outputs] for outputs in (engine, trainer))
        return engine, trainer

    def _apart(self, outputs: Sequence[_Output], base: Sequence[_Output], allowed: Sequence[_Output]) -> str:
        """Return where and how far outputs differ the most, and in how many prompts; "" if they agree."""
        places = []
        for number, (output, expected, tolerance) in enumerate(zip(outputs, base, allowed, strict=True), start=1):
            if output.shape != expected.shape:
                return f"prompt {number} has {tuple(output.shape)}, and {tuple(expected.shape)} there"
            if (worst := difference(output, expected, tolerance)) is not None:
                token = f", token {worst.worst[1]}" if len(worst.worst) > 1 else ""
                values = f"{show(worst.got, torch.float32)} for {show(worst.expected, torch.float32)}"
                places.append(
                    f"{values} at position {worst.worst[0]}{token} of prompt {number}, tolerance {worst.tolerance:.2g}"
                )
        return f"{places[0]}; in {len(places)} of {len(base)} prompts" if places else ""

    def _explanations(self, engine: list[_Output], trainer: list[_Output], allowed: list[_Output]) -> list[str]:
        """Return what makes the trainer's log-probabilities equal to the engine's: each is a control."""
        old, _ = self._on_common_terms(self._outputs("trainer", "old"), self._outputs("engine"))

        def explained(changed: list[_Output]) -> bool:
            return not self._apart(engine, changed, allowed)

        if explained(old):
            return ["they are those of the trainer's weights of the synchronization before"]
        for by, words in (1, "the next"), (-1, "the previous"):
            pairs = [(output[:-1], expected[1:]) if by == 1 else (output[1:], expected[:-1])
                     for output, expected in zip(engine, trainer, strict=True)]  # fmt: skip
            moved, base = ([pair[side] for pair in pairs] for side in range(2))
            if not self._apart(moved, base, [tolerance[1:] for tolerance in allowed]):
                return [f"they are those of {words} position of the trainer"]
        facts = []
        if engine[0].dim() == 2:
            if explained([output.log_softmax(-1) for output in trainer]) and not explained(trainer):
                facts.append("the trainer's are not normalized: after log_softmax they are equal")
            elif not self._apart([output.log_softmax(-1) for output in engine], trainer, allowed):
                facts.append("the engine's are not normalized: after log_softmax they are equal")
            factor = _temperature(engine, trainer)
            if explained([(output * factor).log_softmax(-1) for output in trainer]):
                facts.append(f"they are the trainer's at temperature {1 / factor:.3g}")
            elif kept := {int(count) for output in engine for count in output.isfinite().sum(-1)}:
                filtered = [torch.where(output.isfinite(), expected, -torch.inf).log_softmax(-1)
                            for output, expected in zip(engine, trainer, strict=True)]  # fmt: skip
                if max(kept) < engine[0].shape[-1] and explained(filtered):
                    sizes = f"{min(kept)} to {max(kept)}" if len(kept) > 1 else str(min(kept))
                    facts.append(
                        f"they are the trainer's, filtered to {sizes} tokens and normalized again (top-k or top-p)"
                    )
        if not facts:
            facts += self._onset(engine, trainer, allowed)
        return facts

    @staticmethod
    def _onset(engine: list[_Output], trainer: list[_Output], allowed: list[_Output]) -> Iterator[str]:
        """Yield the position that both sides agree up to, in all prompts."""
        starts = []
        for output, expected, tolerance in zip(engine, trainer, allowed, strict=True):
            rows = ((output - expected).abs() > tolerance).reshape(len(output), -1).any(1)
            starts.append(int(rows.int().argmax()) if bool(rows.any()) else len(rows))
        if min(starts) > 0:
            yield f"they agree at positions 0 to {min(starts) - 1}, and differ from {min(starts)} on"

    def _first_module(self) -> Iterator[str]:
        """Yield the first module, in the order of the trainer's calls, whose output differs from its namesake's."""
        own, others = (self.saved[self.owners[label][0]]["new answers"][label][0] for label in ("trainer", "engine"))
        tolerances = [self.saved[self.owners[label][0]]["tolerances"].get(label, [{}])[0] for label in SIDES]
        for name, output in own.items():
            if name == OUTPUT or name not in others or others[name].shape != output.shape:
                continue
            allowed = sum((tolerance.get(name, 0.0) for tolerance in tolerances), start=torch.zeros_like(output))
            if (worst := difference(others[name], output, 2 * allowed)) is not None:
                yield (
                    f"the first module whose output differs is {name}: {show(worst.got, torch.float32)} on the engine, "
                    f"{show(worst.expected, torch.float32)} on the trainer"
                )
                return


def _temperature(engine: Sequence[_Output], trainer: Sequence[_Output]) -> float:
    """Return the factor of the trainer's logits that comes nearest to the engine's: a fit of least squares."""
    centered = [[output - output.mean(-1, keepdim=True) for output in outputs] for outputs in (engine, trainer)]
    above = sum(float((own * other).nan_to_num(0.0, 0.0, 0.0).sum()) for own, other in zip(*centered, strict=True))
    return above / (sum(float(other.square().nan_to_num(0.0, 0.0, 0.0).sum()) for other in centered[1]) or 1.0) or 1.0


def _of_tokens(output: _Output, prompt: torch.Tensor) -> _Output:
    return output if output.dim() == 1 else output[:-1].gather(-1, prompt[1:, None].cpu())[:, 0]


def _has_output(answers: Sequence[Answers]) -> bool:
    return bool(answers) and all(OUTPUT in each for each in answers)


def _expected(name: str, names: Mapping[str, Sequence[str]], of_trainer: Sequence[str]) -> list[str]:
    """Return the trainer's tensors whose rows a tensor of the engine should have; empty if that is not given."""
    for pattern, sources in names.items():
        if fnmatchcase(name, pattern):
            head, _, tail = pattern.partition("*")
            middle = name[len(head) : len(name) - len(tail)] if "*" in pattern else ""
            return [source.replace("*", middle, 1) for source in sources]
    return [name] if name in of_trainer and names else []


def _rows(tensor: torch.Tensor) -> list[bytes]:
    return _pieces(tensor, tensor.shape[-1]) if tensor.dim() > 1 and tensor.numel() else []


def _pieces(tensor: torch.Tensor, width: int) -> list[bytes]:
    data, step = bytes_of(tensor), width * tensor.element_size()
    return [data[start : start + step] for start in range(0, len(data), step)]


def _share(rows: torch.Tensor, words: str) -> str:
    count, total = int(rows.sum()), len(rows)
    return f"hold {words}" if count == total else f"hold {words} in {count} of {total} rows"
