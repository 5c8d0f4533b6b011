"""Mistakes in how a sequence is split among ranks, as the labels of losses show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mgpu_check.mistakes.report import Finding

if TYPE_CHECKING:
    from mgpu_check.mistakes.observed import Labels
    from mgpu_check.mistakes.tensors import Tensors

__all__ = ["labels_shifted_after_split"]

_Rows = list[tuple[int, ...]]
"""Labels, a row for each sample."""
_BITS = 16.0
"""How improbable it has to be that labels are the next tokens by chance: 2^-16, where a few layouts are tried."""


def labels_shifted_after_split(tensors: Tensors) -> Finding | None:
    """Name labels that each rank has shifted within its own part of the sequence.

    All labels of a rank but the last are those of the next token in its part. Where the next token of the whole sequence is
    on another rank, one device has another label.
    """
    alone = [] if tensors.alone is None else tensors.alone.labels
    ranks = [trace.labels for trace in tensors.traces]
    if not alone or len(ranks) < 2 or any(len(one) != len(alone) for one in ranks):
        return None
    for number, whole in enumerate(alone):
        of_ranks = [one[number] for one in ranks]
        rows = _rows(whole, tensors.samples)
        if rows is None or len({labels.site for labels in of_ranks}) > 1:
            continue
        for parts, chunks_of in _layouts(tensors.size):
            if (found := _shifted_within(rows, of_ranks, parts, chunks_of, tensors.samples)) is not None:
                rank, got, right = found
                return Finding(
                    "labels-shifted-after-split",
                    f"the labels of {of_ranks[0].site} are the next tokens within each of {parts} parts of the sequence: where a "
                    f"part ends on rank {rank} the label is {got}, and {right} on one device",
                )
    return None


def _layouts(size: int) -> Iterator[tuple[int, Callable[[int], tuple[int, ...]]]]:
    """Yield into how many parts a sequence may be cut, and which chunks a rank has: one, or one from each end.

    Neighbours have parts that follow each other, and groups of ranks have samples of their own; or the other way round.
    """
    for parts in range(size, 1, -1):
        if size % parts:
            continue
        for index in dict.fromkeys(
            (tuple(r % parts for r in range(size)), tuple(r // (size // parts) for r in range(size)))
        ):
            yield parts, lambda rank, index=index: (index[rank],)  # type: ignore[misc]
            yield parts, lambda rank, index=index, parts=parts: (index[rank], 2 * parts - 1 - index[rank])  # type: ignore[misc]


def _shifted_within(
    rows: _Rows,
    of_ranks: Sequence[Labels],
    parts: int,
    chunks_of: Callable[[int], tuple[int, ...]],
    samples: int,
) -> tuple[int, str, int] | None:
    """Return the rank, its label and that of one device, at the first end of a part; None where labels are otherwise."""
    size = len(of_ranks)
    found, bits, counts = None, 0.0, Counter(label for row in rows for label in row)
    for rank, labels in enumerate(of_ranks):
        chunks = chunks_of(rank)
        mine = _rows(labels, samples * parts // size) if samples * parts % size == 0 else None
        if mine is None:
            return None
        shown = len(mine[0])  # the last one may be left out
        whole = len(rows[0])
        for tokens in {whole, whole + 1}:
            # Of which positions a rank has the tokens.
            length, rest = divmod(tokens, parts * len(chunks))
            places = [place for chunk in chunks for place in range(chunk * length, (chunk + 1) * length)]
            if not rest and shown in (len(places), len(places) - 1):
                break
        else:
            return None
        candidates = [rows[start:][: len(mine)] for start in range(0, len(rows), len(mine))]
        own = next((own for own in candidates if _are_next(own, mine, places)), None)
        if own is None:
            return None
        known = [label for row in mine for label in row[: len(places) - 1]]
        bits += sum(math.log2(counts.total() / counts[label]) for label in known)
        odd = _odd(own, mine, places, labels.ignored)
        found = found or (None if odd is None else (rank, *odd))
    return found if bits >= _BITS else None


def _are_next(rows: _Rows, mine: _Rows, places: Sequence[int]) -> bool:
    """Return whether each label of a rank but the last is the next token that the rank has."""
    # The label of a position is the token of the next one.
    return all(
        label == row[following - 1]
        for row, own in zip(rows, mine, strict=True)
        for label, following in zip(own[: len(places) - 1], places[1:], strict=True)
    )


def _odd(rows: _Rows, mine: _Rows, places: Sequence[int], ignored: int | None) -> tuple[str, int] | None:
    """Return a label that is not the one of one device, and that one, where a part ends within the sequence."""
    for row, own in zip(rows, mine, strict=True):
        for number, place in enumerate(places):
            if place >= len(row) or row[place] == ignored:
                continue
            got = own[number] if number < len(own) else None
            if got != row[place]:
                return "left out" if got in (None, ignored) else str(got), row[place]
    return None


def _rows(labels: Labels, samples: int) -> _Rows | None:
    length, rest = divmod(len(labels.values), samples) if samples else (0, 1)
    if rest or length < 2:
        return None
    return [labels.values[start : start + length] for start in range(0, len(labels.values), length)]
