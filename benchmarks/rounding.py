"""Measure how close sums, means and products of right programs come to their bounds: 100,000 of each in each dtype.

    python benchmarks/rounding.py

Each is a sum (mean, product) of 2 to 16 numbers that use all bits, or of one large number and small ones,
added up one by one or as a tree, in a shuffled order. Printed are how many were beyond the bound (there must be
none), and the largest share of the bound that one has used: above 0.01 the bound is within 100 times of the worst seen.
"""

from __future__ import annotations

import argparse

import torch

from mgpu_check.numerics.reduction import random_parts, reduced

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OPERATIONS = ("sum", "avg", "product")


def folded(terms: torch.Tensor, operation: str, tree: bool) -> torch.Tensor:
    """Combine terms (number of terms, elements) of each column, in the dtype of the terms."""
    parts = list(terms)
    while len(parts) > 1:
        if tree:
            pairs = [
                one * other if operation == "product" else one + other
                for one, other in zip(parts[::2], parts[1::2], strict=False)
            ]
            parts = pairs + parts[2 * len(pairs) :]
        else:
            first = parts[0] * parts[1] if operation == "product" else parts[0] + parts[1]
            parts = [first, *parts[2:]]
    return parts[0] / len(terms) if operation == "avg" else parts[0]


def measured(dtype: torch.dtype, operation: str, wanted: int) -> tuple[int, int, float]:
    """Return how many results there were, how many beyond the bound, and the largest share of it."""
    done = beyond = 0
    worst = 0.0
    generator = torch.Generator().manual_seed(0)
    seed = 0
    while done < wanted:
        seed += 1
        count = 2 + seed % 15
        elements = 2000
        parts = random_parts((elements,), dtype, count=count, seed=seed)
        if seed % 3 == 0:
            parts = [part if number == 0 else part / 256 for number, part in enumerate(parts)]
        should = reduced(parts, operation)
        # An order of its own for each element.
        order = torch.rand(count, elements, generator=generator).argsort(0)
        got = folded(torch.stack(parts).gather(0, order), operation, tree=bool(seed % 2))
        off = (got.double() - should.value).abs()
        off = torch.where(got.double() == should.value, 0.0, off)
        beyond += int((~(off <= should.tolerance)).sum())
        share = (off / should.tolerance).nan_to_num(0.0, posinf=0.0)
        worst = max(worst, float(share.max()))
        done += elements
    return done, beyond, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=int, default=100_000, help="of each operation in each dtype (default: 100,000)"
    )
    wanted = parser.parse_args().results
    print("| dtype | operation | results | beyond the bound | largest share of it |\n|---|---|---|---|---|")
    for dtype in DTYPES:
        for operation in OPERATIONS:
            done, beyond, worst = measured(dtype, operation, wanted)
            print(
                f"| {str(dtype).removeprefix('torch.')} | {operation} | {done} | {beyond} | {worst:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
