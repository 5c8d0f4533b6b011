"""Make small random files of the form that their names show: rows of text, tables, tokens, arrays, images, sounds.

A maker gets the path to write, a `Request`, and the options of the plan for this name. It adds its defaults to the
options, so that they say afterwards what was made. The name alone seeds the contents.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import pickle
import random
import re
import tarfile
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from mgpu_check.compare.fake_data import evidence

SAMPLES = 64  # rows, or files: a few steps of a few ranks, and a short epoch
_LINES = 1024  # of a text: more characters than the longest usual context
_TOKENS = 2**17  # more than the longest usual context, and few enough to read at once
_VOCABULARY = 65  # as of characters, the smallest usual one
_RATE = 16000
_SIDE = 256  # pixels: the usual crops are smaller
_WORDS = ("the", "a", "of", "and", "to", "in", "is", "it", "was", "for", "on", "are", "be", "at", "river", "stone")


@dataclass(frozen=True)
class Request:
    """A call of the script that needs data."""

    name: str  # the path or name as the script gives it
    call: str  # the function, such as "open"
    file: str  # the source file of the script that asks
    line: int
    hints: Mapping[str, Any] = field(default_factory=dict)  # arguments of the call that show the form

    def seed(self, part: object = "") -> int:
        return int.from_bytes(hashlib.sha256(f"{self.name}\0{part}".encode()).digest()[:4], "big")

    def random(self, part: object = "") -> random.Random:
        return random.Random(self.seed(part))

    def generator(self, part: object = "") -> Any:
        """Return a generator of NumPy."""
        import numpy as np

        return np.random.default_rng(self.seed(part))


Options = dict[str, Any]
Maker = Callable[[str, Request, Options], None]

_COLUMNS = (
    (r"labels?|targets?|class(_id)?|category|fine_label|coarse_label|y|stars|rating|gold", "class 2"),
    (r"(input_)?(images?|imgs?|pixel_values|picture|photo)", "image"),
    (r"audio|speech|waveform", "audio"),
    (r"messages|conversations?|dialog|chat", "chat"),
    (r"input_ids|token_ids|tokens|ids", "tokens"),
    (r"id|idx|index|.*_id", "int"),
    (r"price|score|value|weight|height|age|time|x\d*|f\d+|.*_(score|value)|lat|lon", "float"),
    (r".*(filename|file_name|path|file)", "path"),
    (
        r"text|sentence\d?|questions?\d?|premise|hypothesis|content|document|article|summary|highlights|title|body|"
        r"review|comment|caption|query|context|passage|answer|response|instruction|input|output|prompt|completion|"
        r"source|src|tgt|dialogue|code|transcription|headline|abstract|story|chosen|rejected|description|system",
        "string",
    ),
)
"""The name of a column -> its kind. Another name has the kind ""."""


def column_kind(name: str) -> str:
    return next((kind for pattern, kind in _COLUMNS if re.fullmatch(pattern, name.lower())), "")


def columns_of(files: Sequence[str], default: str, unknown: str = "") -> dict[str, str]:
    """Return column -> kind for rows, from the names that source files use.
    `default`: columns, if they use none. `unknown`: kind of keys whose names show none; "" leaves them out."""
    kinds = {key: column_kind(key) or unknown for file in files for key in evidence.keys(file)}
    if not any(kinds.values()):
        kinds = {word: column_kind(word) for file in files for word in evidence.strings(file) if len(word) > 2}
    columns = {name: kind for name, kind in kinds.items() if kind}
    if all(kind.startswith("class") for kind in columns.values()):  # nothing to learn from
        columns = {name: column_kind(name) for name in default.split()} | columns
    return columns


def text(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(8, 40)))


def _chat(rng: random.Random, file: str) -> list[dict[str, str]]:
    role, content, *speakers = ("role", "content", "user", "assistant")
    if {"from", "value"} <= set(evidence.strings(file)):
        role, content, *speakers = ("from", "value", "human", "gpt")
    return [{role: speaker, content: text(rng)} for speaker in speakers * 2]


def image(rng: Any, size: Sequence[int] = (), mode: str = "") -> Any:
    """Return an image of PIL, of a few large random patches."""
    from PIL import Image

    small = Image.fromarray(rng.integers(0, 256, (8, 8) if mode == "L" else (8, 8, 3), dtype="uint8"))
    return small.convert(mode or "RGB").resize(tuple(size) or (_SIDE, _SIDE))


def value(kind: str, request: Request, column: str, row: int) -> Any:
    """Return the value of a column in a row; an image is one of PIL, a sound a dict as of `datasets`."""
    part = f"{column} {row}"
    rng, (name, *rest) = request.random(part), kind.split()
    numbers = [int(word) for word in rest if word.isdigit()]
    values: dict[str, Callable[[], Any]] = {
        "class": lambda: row % numbers[0],
        "int": lambda: row,
        "float": lambda: rng.gauss(0, 1),
        "string": lambda: text(rng),
        "chat": lambda: _chat(rng, request.file),
        "tokens": lambda: [rng.randrange(_VOCABULARY) for _ in range(128)],
        "path": lambda: f"{column}_{row:05}{next(iter(rest), suffix_in(request.file) or '.png')}",
        "image": lambda: image(request.generator(part), numbers, "".join(word for word in rest if word.isalpha())),
        "audio": lambda: {"array": request.generator(part).normal(0, 0.1, _RATE), "sampling_rate": _RATE},
    }
    return values[name]()


def _table(path: str, request: Request, options: Options) -> None:
    suffix = os.path.splitext(path)[1]
    is_csv = suffix in (".csv", ".tsv")
    default, unknown = ("f0 f1 f2 f3 f4 f5 f6 f7 label", "float") if is_csv else ("text label", "string")
    columns = options.setdefault("columns", columns_of([request.file], default, unknown))
    numbers = range(options.setdefault("samples", SAMPLES))
    rows = [{name: value(kind, request, name, row) for name, kind in columns.items()} for row in numbers]
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    with open(path, "w", encoding="utf-8", newline="") as file:
        if suffix == ".json":
            json.dump(rows, file)
        elif is_csv:
            writer = csv.DictWriter(file, list(columns), delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _coco(path: str, request: Request, options: Options) -> None:
    """Write annotations in the format of COCO: a box with its polygon in each image, and a caption."""
    numbers = range(1, 1 + options.setdefault("samples", SAMPLES))
    classes = options.setdefault("classes", 10)
    box = [_SIDE // 4, _SIDE // 4, _SIDE // 2, _SIDE // 2]  # left, top, width, height
    low, high = _SIDE // 4, 3 * _SIDE // 4
    polygon = [low, low, high, low, high, high, low, high]
    annotation = {"bbox": box, "area": box[2] * box[3], "iscrowd": 0, "segmentation": [polygon]}
    rows = {
        "images": [{"id": n, "file_name": f"{n:012}.jpg", "width": _SIDE, "height": _SIDE} for n in numbers],
        "annotations": [
            {"id": n, "image_id": n, "category_id": 1 + n % classes, "caption": text(request.random(n)), **annotation}
            for n in numbers
        ],
        "categories": [{"id": 1 + n, "name": str(n), "supercategory": ""} for n in range(classes)],
    }
    Path(path).write_text(json.dumps(rows), encoding="utf-8")


def _text(path: str, request: Request, options: Options) -> None:
    rng = request.random()
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"{text(rng).capitalize()}.\n" for _ in range(options.setdefault("lines", _LINES)))


_ARRAYS = (
    (r"label|target|(^|_)y(_|\.|$)|class", [SAMPLES], "int64", 2),
    (r"(token|ids|text|corpus).*\.npy$", [_TOKENS], "uint16", _VOCABULARY),
    (r"token|ids|text|corpus", [_TOKENS], "int64", _VOCABULARY),
    (r"image|img|pixel", [SAMPLES, 32, 32, 3], "uint8", 256),
    (r"", [SAMPLES, 16], "float32", 0),
)
"""The name of an array -> its shape, its dtype, and what its numbers are below; 0 for normal numbers."""


def _array(request: Request, options: Options, name: str) -> Any:
    """Return an array for a name: labels, token ids, images, or rows of numbers."""
    import numpy as np

    word = os.path.basename(name).lower()
    default = next(form for pattern, *form in _ARRAYS if re.search(pattern, word))
    keys = ("shape", "dtype", "below")
    shape, dtype, below = (options.setdefault(key, it) for key, it in zip(keys, default, strict=True))
    rng, whole = request.generator(name), below and np.issubdtype(dtype, np.integer)
    return (rng.integers(0, below, shape) if whole else rng.normal(0, 1, shape)).astype(dtype)


def _array_file(path: str, request: Request, options: Options) -> None:
    """Write an array as raw numbers (.bin), or for `numpy.load`."""
    import numpy as np

    if path.endswith(".bin"):
        dtype = str(np.dtype(request.hints.get("dtype") or "uint16"))
        options.update({"shape": [_TOKENS], "dtype": dtype, "below": _VOCABULARY} | options)
    array = _array(request, options, request.name)
    if path.endswith(".bin"):
        array.tofile(path)
    else:
        np.save(path, array)


def _arrays_file(path: str, request: Request, options: Options) -> None:
    names = options.setdefault("arrays", {key: {} for key in evidence.keys(request.file) or ("x", "y")})
    arrays = {name: _array(request, own, name) for name, own in names.items()}
    if path.endswith(".npz"):
        import numpy as np

        np.savez(path, **arrays)
    else:
        import h5py

        with h5py.File(path, "w") as file:
            file.update(arrays)


def _vocabulary(path: str, request: Request, options: Options) -> None:
    characters = [chr(code) for code in (10, *range(32, 32 + _VOCABULARY - 1))]
    codes = {character: code for code, character in enumerate(characters)}
    with open(path, "wb") as file:
        pickle.dump({"vocab_size": _VOCABULARY, "stoi": codes, "itos": dict(enumerate(characters))}, file)


def _picture(path: str, request: Request, options: Options) -> None:
    image(request.generator(), options.setdefault("size", [_SIDE, _SIDE]), options.setdefault("mode", "RGB")).save(path)


def _sound(path: str, request: Request, options: Options) -> None:
    with wave.open(path, "wb") as file:
        rate = options.setdefault("rate", evidence.setting("sampl(e|ing)_?rate") or _RATE)
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(request.generator().normal(0, 3000, rate).astype("int16").tobytes())


def _shard(path: str, request: Request, options: Options) -> None:
    """Write samples with all usual parts: a script takes those that it decodes."""
    samples, classes = options.setdefault("samples", SAMPLES), options.setdefault("classes", 10)
    with tarfile.open(path, "w") as shard:
        for row in range(samples):
            parts = {"cls": str(row % classes).encode(), "txt": text(request.random(row)).encode()}
            for suffix, codec in (("jpg", "JPEG"), ("png", "PNG")):
                image(request.generator(row)).save(encoded := BytesIO(), codec)
                parts[suffix] = encoded.getvalue()
            for suffix, content in parts.items():
                entry = tarfile.TarInfo(f"{row:06}.{suffix}")
                entry.size = len(content)
                shard.addfile(entry, BytesIO(content))


_PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
FORMS: Mapping[str, tuple[str, Maker]] = {
    ".txt": ("lines of text", _text),
    ".json": ("a list of rows", _table),
    **dict.fromkeys((".jsonl", ".ndjson"), ("rows of JSON", _table)),
    **dict.fromkeys((".csv", ".tsv", ".parquet"), ("a table", _table)),
    ".bin": ("token ids", _array_file),
    ".npy": ("an array", _array_file),
    **dict.fromkeys((".npz", ".h5", ".hdf5"), ("arrays", _arrays_file)),
    ".pkl": ("a vocabulary of characters", _vocabulary),
    **dict.fromkeys(_PICTURES, ("an image", _picture)),
    ".wav": ("a sound", _sound),
    ".tar": ("a shard of samples", _shard),
}
"""The end of a file's name -> its form, and the maker."""


_STATE = re.compile(
    r"ckpt|checkpoint|model|weight|best|last|latest|epoch|resume|snapshot|optim|state|pretrained|adapter|scheduler|cache"
)
_DATA = re.compile(r"data|train|val|test|dev|token|corpus|text|sample|feature|image|label|input|shard|fineweb|wiki")
_SETTINGS = re.compile(r"conf|setting|vocab|args|token|param|schema|class|index|manifest|meta|result|log|stat")


def form_of(path: str) -> tuple[str, Maker] | None:
    """Return the form of a file, from its name; None if the name shows none, or it may be a checkpoint or settings."""
    name = os.path.basename(path).lower()
    suffix = os.path.splitext(name)[1]
    if re.search(r"(^|/)annotations/.*\.json$|(instances|captions)_\w+\.json$", path):
        return "annotations of COCO", _coco
    if suffix in (".bin", ".npz", ".h5", ".hdf5") and _STATE.search(name) and not _DATA.search(name):
        return None
    if (suffix == ".json" and _SETTINGS.search(name)) or (suffix == ".pkl" and name != "meta.pkl"):
        return None
    return FORMS.get(suffix)


def suffix_in(file: str) -> str | None:
    """Return the end of names of data files that a source file mentions first."""
    matches = (re.search(r"(?:^|\*)(\.[a-z0-9]+)$", word) for word in evidence.strings(file))
    suffixes = [match[1] for match in matches if match]
    return next((it for it in suffixes if it in FORMS and it not in (".pkl", ".json")), None)


def tree(path: str, request: Request, options: Options) -> None:
    """Write a directory of files: those of a pattern; else in a directory for each class, or all in one."""
    suffix = str(options.setdefault("suffix", request.hints.get("suffix") or suffix_in(request.file)))
    classes = options.setdefault("classes", request.hints.get("classes", 4 * evidence.lists_classes(request.file)))
    pattern = request.hints.get("pattern", f"*/*{suffix}" if classes else f"*{suffix}")
    *directories, name = (part for part in pattern.split(os.sep) if part != "**")
    for row in range(options.setdefault("samples", SAMPLES if suffix in (*_PICTURES, ".wav") else 8)):
        own = os.path.join(path, *(part.replace("*", f"class_{row % classes}") for part in directories))
        os.makedirs(own, exist_ok=True)
        file = Request(f"{request.name}/{row}", "", request.file, request.line)
        FORMS[suffix][1](os.path.join(own, name.replace("*", f"{row:05}")), file, {})
