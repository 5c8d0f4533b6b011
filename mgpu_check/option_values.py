"""Read the values of options from text. Each raises ValueError that names the valid set."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["glance", "quick", "standard", "long"]
LEVELS: tuple[Level, ...] = get_args(Level)
Depth = Literal["quick", "standard", "long"]
"""How much a check does at a level; see `Settings.depth`."""


_ON, _OFF = ("true", "yes", "on"), ("", "false", "no", "off")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def gpus(text: str) -> int | None:
    if text == "all":
        return None
    if re.fullmatch(r"\d+", text) and int(text) >= 1:
        return int(text)
    raise ValueError("choose a whole number of at least 1, or 'all'")


def simulate(text: str) -> str | None:
    if text.lower() in ("0", *_OFF):
        return None
    if text.lower() in ("1", *_ON):
        return "cpu"
    if re.fullmatch(r"cpu|cuda:\d+", text):
        return text
    raise ValueError("choose 'cpu', or the real device that backs the simulated ones, such as 'cuda:0'")


def seconds(text: str) -> float:
    if not 0 < (number := _number(text)) < math.inf:
        raise ValueError("choose a number of seconds above 0, such as 60 or 2.5")
    return number


KEPT_WARM = 300.0
"""Seconds that imports are kept if no time is given: enough to read a failure and mend it."""


def keep_warm(text: str) -> float | None:
    if text.lower() in _OFF:
        return None
    if text.lower() in _ON:
        return KEPT_WARM
    if not 0 <= (number := _number(text)) < math.inf:
        raise ValueError("choose seconds, such as 600; 0 to end the keeper after this run; no for none")
    return number


_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float | None:
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|)", text)
    if match is None or not float(match[1]):
        raise ValueError("choose a time above 0 with its unit, such as 90s, 30m, 2h or 3d")
    return float(match[1]) * _UNITS[match[2]]


def depth_of(level: Level) -> Depth:
    """Return how much a check does at a level: a glance makes fewer checks, each as a quick run does."""
    return "quick" if level == "glance" else level


def level(text: str) -> Level:
    for name in LEVELS:
        if name == text:
            return name
    raise ValueError(f"choose one of {', '.join(LEVELS)}")


def share(text: str) -> float:
    if not 0 < (number := _number(text)) < 1:
        raise ValueError("choose a share of the free memory, above 0 and below 1, such as 0.9")
    return number


def lines(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line.strip() for line in text.split("\n") if line.strip()))


def reports(text: str) -> tuple[str, ...]:
    files = lines(text)
    if files and all(file.lower().endswith(".md") for file in files):
        return files
    raise ValueError("choose a file whose name ends in .md")


def file(text: str) -> str | None:
    return text or None


def annotation_format(text: str) -> str:
    if text not in ("github", "none"):
        raise ValueError("choose github or none")
    return text


def switch(text: str) -> bool:
    if text.lower() in ("1", *_ON):
        return True
    if text.lower() in ("0", *_OFF):
        return False
    raise ValueError("choose true or false")


ARITHMETIC_VARIABLE = "MGPU_CHECK_SIMULATE_ARITHMETIC"
"""The environment variable of the option: every process of a run reads it."""

ARITHMETIC_KINDS = {
    "order": "sums, products and convolutions add their terms in another order, which depends on the shapes (cuBLAS "
    "and cuDNN choose kernels by shape: torch's notes on numerical accuracy); norms, softmax and losses are rounded "
    "once",
    "ulp": "exp, log, sin, tanh, pow, rsqrt and the like differ within the maximal errors of the CUDA C++ Programming "
    "Guide, Mathematical Functions",
    "fma": "float32 a*b+c is rounded once (nvcc --fmad=true): addcmul, addcdiv, fused and foreach optimizers",
    "tf32": "operands of float32 products and convolutions have 10 bits of mantissa where torch's switches allow TF32",
    "atomics": "index_add, scatter_add, gradients of convolution, padding and interpolation add in another order in "
    "each call, unless torch.use_deterministic_algorithms (torch's notes on reproducibility)",
    "nondeterministic": "operators without a deterministic kernel, and cuBLAS without CUBLAS_WORKSPACE_CONFIG, raise "
    "torch's error under torch.use_deterministic_algorithms(True)",
    "split-k": "float16 and bfloat16 products of 512 terms or more sum in pieces that are rounded to that dtype, and "
    "attention rounds its weights to it (torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction, "
    "FlashAttention)",
    "philox": "random numbers depend on how many are drawn in one call (Philox counts by thread)",
    "ties": "topk and an unstable sort choose others among equal elements",
    "casts": "float to integer saturates and NaN becomes 0; an integer division by zero raises nothing",
    "layout": "results of convolutions are channels_last if an operand is (cuDNN); nonzero is contiguous",
    "zeros": "products begin at +0.0; maximum of both zeros is +0.0, minimum is -0.0 (PTX ISA, max and min)",
    "nan": "NaN from arithmetic has the bits of PTX's canonical NaN; NCCL's MAX and MIN ignore NaN",
    "reciprocal": "a division by a number multiplies by its reciprocal (BinaryDivTrueKernel.cu), mean by 1/n "
    "(ReduceMomentKernel.cu)",
    "nccl": "sums of collectives go along a ring that begins at another rank for each chunk, rounded after each hop; "
    "AVG multiplies by 1/n first (ncclDevPreMulSum)",
}
"""Name of a kind -> what it does, and why a healthy GPU may do it."""

_VALUES = (
    f"cpu, gpu (all kinds), or kinds separated by commas: {', '.join(ARITHMETIC_KINDS)}; -KIND takes one away from gpu"
)


@dataclass(frozen=True)
class ArithmeticSettings:
    """The kinds that are on.

    Attributes:
        kinds: names of `ARITHMETIC_KINDS`; none for the arithmetic of the backing device.
        seed: decides the orders of additions; None for the same orders of "order" in all processes, and for others of
            "atomics" in each.
    """

    kinds: frozenset[str] = frozenset()
    seed: int | None = None

    def __str__(self) -> str:
        seed = "" if self.seed is None else f",seed={self.seed}"
        missing = sorted(ARITHMETIC_KINDS.keys() - self.kinds)
        if not self.kinds:
            return "cpu"
        if 2 * len(missing) < len(ARITHMETIC_KINDS):
            return ",".join(["gpu", *(f"-{name}" for name in missing)]) + seed
        return ",".join(name for name in ARITHMETIC_KINDS if name in self.kinds) + seed


def parse_arithmetic(text: str) -> ArithmeticSettings:
    """Return the settings for "gpu", "order,ulp", "gpu,-zeros" or "gpu,seed=7". Raises `ValueError`: names the set."""
    kinds: set[str] = set()
    removed: set[str] = set()
    seed = None
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word == "gpu":
            kinds |= ARITHMETIC_KINDS.keys()
        elif word.startswith("seed=") and word[5:].isdecimal():
            seed = int(word[5:])
        elif word in ARITHMETIC_KINDS:
            kinds.add(word)
        elif word[:1] == "-" and word[1:] in ARITHMETIC_KINDS:
            removed.add(word[1:])
        elif word != "cpu" or text.strip() != "cpu":
            raise ValueError(f"no kind of arithmetic is called {word!r}; choose {_VALUES}")
    if removed - kinds:
        raise ValueError(f"-{sorted(removed - kinds)[0]} takes away what is not there; begin with gpu, as in gpu,-ulp")
    if seed is not None and not kinds:
        raise ValueError("a seed alone has no meaning; begin with gpu, as in gpu,seed=7")
    return ArithmeticSettings(frozenset(kinds - removed), seed)


def arithmetic_of_environment() -> ArithmeticSettings:
    """Return the settings of this process."""
    return parse_arithmetic(os.environ.get(ARITHMETIC_VARIABLE, ""))
