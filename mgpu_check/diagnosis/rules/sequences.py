"""Detect mistakes in how ranks split a sequence, from the labels of losses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.registry import Precedence, mistake, on_tensors
from mgpu_check.diagnosis.report import Finding

if TYPE_CHECKING:
    from mgpu_check.diagnosis.observed import Labels
    from mgpu_check.diagnosis.tensors import Tensors

_Rows = list[tuple[int, ...]]
"""Labels, a row for each sample."""
_BITS = 16.0
"""Evidence required, in bits: labels match the next tokens by chance with a probability of 2^-16 per layout."""

mistake(
    "labels-shifted-after-split",
    "labels are shifted after the sequence is split, so the last token of each part has no label, or a wrong one",
    "shift labels on the whole sequence, and split inputs and labels after that",
)


@on_tensors(Precedence.SAMPLES + 40)
def labels_shifted_after_split(tensors: Tensors) -> Finding | None:
    """Detect labels that each rank shifted within its own part of the sequence.

    Each label of a rank but the last is the next token of its part. At the end of a part the next token of the sequence
    is on another rank, and the label differs from one device.
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
                    f"the labels of {of_ranks[0].site} are the next tokens within each of {parts} parts of the "
                    f"sequence: where a part ends on rank {rank} the label is {got}, and {right} on one device",
                    site=of_ranks[0].site,
                )
    return None


def _layouts(size: int) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """Yield layouts of a sequence: the number of parts, and a function from rank to the chunks that the rank holds.

    A rank holds one chunk, or one from each end, which balances causal attention. With fewer parts than ranks, groups
    of ranks hold different samples, and either neighbours share a group or neighbours share a part.
    """
    for parts in range(size, 1, -1):
        if size % parts:
            continue
        for index in dict.fromkeys(
            (tuple(r % parts for r in range(size)), tuple(r // (size // parts) for r in range(size)))
        ):
            yield parts, [(part,) for part in index]
            yield parts, [(part, 2 * parts - 1 - part) for part in index]


def _shifted_within(
    rows: _Rows, of_ranks: Sequence[Labels], parts: int, chunks_of: Sequence[tuple[int, ...]], samples: int
) -> tuple[int, str, int] | None:
    """Return the first wrong label as rank, label and right label; None without any, or in another layout.

    Return None also if the labels are too few to exclude chance.
    """
    size = len(of_ranks)
    found, bits, counts = None, 0.0, Counter(label for row in rows for label in row)
    for rank, labels in enumerate(of_ranks):
        chunks = chunks_of[rank]
        mine = _rows(labels, samples * parts // size) if samples * parts % size == 0 else None
        if mine is None:
            return None
        shown = len(mine[0])  # the last one may be left out
        whole = len(rows[0])
        for tokens in {whole, whole + 1}:
            # The positions whose tokens the rank holds.
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
    """Return whether each label of a rank but the last is the next token that the rank holds."""
    # The label of a position is the token of the next one.
    return all(
        label == row[following - 1]
        for row, own in zip(rows, mine, strict=True)
        for label, following in zip(own[: len(places) - 1], places[1:], strict=True)
    )


def _odd(rows: _Rows, mine: _Rows, places: Sequence[int], ignored: int | None) -> tuple[str, int] | None:
    """Return the first label that differs from one device, and the right label; None if no label differs."""
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
