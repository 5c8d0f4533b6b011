"""Make the tiny data sets of the public scripts, and stand-ins for what their packages download or no longer have."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

__all__ = ["MAKERS", "SHIM"]

SHIM = '''\
"""Give old scripts what newer packages lack, and random data what is published with a checksum."""
import builtins, importlib.util, math, sys, types


def _patched(name, module):
    if name == "numpy":
        module.float = float
    if name == "torchvision.datasets.cifar":
        module.check_integrity = lambda *_: True
    if name == "torch.utils.data.sampler":  # custom samplers pass their dataset
        module.Sampler.__init__ = lambda self, *data: None
    if name == "tiktoken_ext.openai_public":
        ranks = {bytes([i]): i for i in range(256)} | {bytes([i % 256, i // 256]): 256 + i for i in range(50000)}
        module.ENCODING_CONSTRUCTORS["gpt2"] = lambda: {
            "name": "gpt2", "explicit_n_vocab": 50257, "pat_str": r"\\S+|\\s+", "mergeable_ranks": ranks,
            "special_tokens": {"<|endoftext|>": 50256},
        }


class _Finder:
    wanted = {"numpy", "torch.utils.data.sampler", "torchvision.datasets.cifar", "tiktoken_ext.openai_public", "torch._six"}

    def find_spec(self, name, path=None, target=None):
        if name not in self.wanted:
            return None
        self.wanted = self.wanted - {name}
        if name == "torch._six":
            import collections.abc
            spec = importlib.util.spec_from_loader(name, self)
            return spec
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), _patched(name, module))
        return spec

    def create_module(self, spec):
        import collections.abc
        module = types.ModuleType(spec.name)
        module.inf, module.container_abcs, module.string_classes = math.inf, collections.abc, (str, bytes)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
'''
"""A ``sitecustomize`` for the processes of the scripts."""

_WORDS = ("one two three four five six seven eight nine ten " * 3).split()


def _picture(draw: np.random.Generator, size: int) -> np.ndarray:
    """Smooth noise, so that pictures differ and compress."""
    small = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return np.kron(small, np.ones((size // 4, size // 4, 1), dtype=np.uint8))


def pictures(to: Path, size: int = 64, count: int = 32, classes: int = 2, split: str = "train") -> None:
    """Make a folder of pictures for each class."""
    from PIL import Image

    draw = np.random.default_rng(1)
    for i in range(count):
        directory = to / split / f"class{i % classes}" if classes else to
        directory.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_picture(draw, size)).save(directory / f"{i:03}.png")


def train_and_val(to: Path) -> None:
    pictures(to)
    pictures(to, count=8, split="val")
    hub = to / "hub" / "facebookresearch_xcit_main"  # a repository that DINO lists when it starts
    hub.mkdir(parents=True)
    (hub / "hubconf.py").write_text("")


def cifar(to: Path) -> None:
    draw = np.random.default_rng(1)
    directory = to / "cifar-10-batches-py"
    directory.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        rows = np.stack([_picture(draw, 32).transpose(2, 0, 1).ravel() for _ in range(16)])
        content = {"data": rows, "labels": [i % 10 for i in range(16)]}
        (directory / name).write_bytes(pickle.dumps(content))
    (directory / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))


def numbered(to: Path) -> None:
    """Make 100 pictures of 16 x 16 in one folder, with labels in their names."""
    pictures(to, size=16, count=104, classes=0)
    for file in sorted(to.glob("*.png")):
        file.rename(file.with_name(f"{int(file.stem) % 2}_{file.name}"))
    labels = [[file.name, i % 2] for i, file in enumerate(sorted(to.glob("*.png")))]
    (to / "dataset.json").write_text(json.dumps({"labels": labels}))


def captions(to: Path) -> None:
    """Make pictures, and a table of their files and captions."""
    pictures(to, count=16, classes=0)
    draw = random.Random(1)
    rows = [f"{file}\t{' '.join(draw.choices(_WORDS, k=6))}" for file in sorted(to.glob("*.png"))]
    (to / "captions.csv").write_text("\n".join(["filepath\ttitle", *rows]))


def tokens(to: Path) -> None:
    """Make a file of GPT-2's tokens: a header of 256 numbers, and 16-bit tokens."""
    to.mkdir(parents=True)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 4096
    drawn = np.random.default_rng(1).integers(0, 50257, 4096, dtype=np.uint16)
    (to / "train.bin").write_bytes(header.tobytes() + drawn.tobytes())


def documents(to: Path) -> None:
    """Make the home directory of nanochat: a tokenizer of bytes, and texts in two Parquet files."""
    import pyarrow
    import pyarrow.parquet
    import tiktoken
    import torch

    draw = random.Random(1)
    special = "bos user_start user_end assistant_start assistant_end python_start python_end output_start output_end"
    names = {f"<|{name}|>": 256 + i for i, name in enumerate(special.split())}
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"\S+|\s+", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens=names
    )
    (to / "tokenizer").mkdir(parents=True)
    (to / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    torch.save(torch.tensor([1] * 256 + [0] * len(names), dtype=torch.int32), to / "tokenizer" / "token_bytes.pt")
    (to / "base_data_climbmix").mkdir()
    for i in range(2):
        texts = [" ".join(draw.choices(_WORDS, k=draw.randint(5, 30))) for _ in range(2048)]
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, to / "base_data_climbmix" / f"shard_{i:05}.parquet", row_group_size=64)


def nothing(to: Path) -> None:
    to.mkdir(parents=True)


MAKERS: dict[str, Callable[[Path], None]] = {
    "classes": train_and_val,
    "cifar": cifar,
    "numbered": numbered,
    "captions": captions,
    "tokens": tokens,
    "documents": documents,
    "": nothing,
}
"""Kind of data -> the function that makes it in an empty directory."""
