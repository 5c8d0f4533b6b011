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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from mgpu_check.compare.fake_data import evidence

SAMPLES = 64  # rows, or files: a few steps of a few ranks, and a short epoch
_LINES = 1024  # of a text: more characters than the longest usual context
_TOKENS = 2**17  # more than the longest usual context, and few enough to read at once
_VOCABULARY = 65  # as of characters, the smallest usual one
_MAGIC = 20240520  # the header of token files of llm.c, and of programs after it
_RATE = 16000
_SIDE = 256  # pixels: the usual crops are smaller
_WORDS = (
    *("the", "a", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with", "they", "be", "at"),
    *("from", "have", "by", "word", "but", "some", "you", "or", "had", "not", "when", "river", "stone", "light"),
)


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

    def array(self, part: object = "") -> Any:
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
    (r"tokens|words", "words"),
    (r"(ner|pos|chunk)_tags", "tags 5"),
    (r"input_ids|token_ids|ids", "tokens"),
    (r"answers", "answers"),
    (r"translation", "pairs"),
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
"""The name of a column -> its kind."""


def column_kind(name: str) -> str | None:
    return next((kind for pattern, kind in _COLUMNS if re.fullmatch(pattern, name.lower())), None)


def columns_of(files: Sequence[str], default: str, unknown: str = "") -> dict[str, str]:
    """Return column -> kind for rows, from the names that source files use.
    `default`: columns, if they use none. `unknown`: kind of keys whose names show none; "" leaves them out."""
    columns: dict[str, str] = {}
    for file in files:
        columns |= {key: column_kind(key) or unknown for key in evidence.keys(file) if column_kind(key) or unknown}
    if not columns:
        words = {word for file in files for word in evidence.strings(file)}
        columns = {word: kind for word in sorted(words) if (kind := column_kind(word)) and len(word) > 2}
    if all(kind.startswith("class") for kind in columns.values()):  # nothing to learn from
        return {name: str(column_kind(name)) for name in default.split()} | columns
    return columns


def text(rng: random.Random, least: int = 8, most: int = 40) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(least, most)))


def _chat(rng: random.Random, files: Sequence[str]) -> list[dict[str, str]]:
    words = {word for file in files for word in evidence.strings(file)}
    role, content = ("from", "value") if {"from", "value"} <= words and "role" not in words else ("role", "content")
    user, assistant = ("human", "gpt") if role == "from" else ("user", "assistant")
    return [{role: speaker, content: text(rng, 4, 12)} for speaker in (user, assistant) * 2]


def image(rng: Any, size: Sequence[int] = (), mode: str = "") -> Any:
    """Return an image of PIL, of a few large random patches."""
    from PIL import Image

    small = Image.fromarray(rng.integers(0, 256, (8, 8) if mode == "L" else (8, 8, 3), dtype="uint8"))
    return small.convert(mode or "RGB").resize(tuple(size) or (_SIDE, _SIDE))


def value(kind: str, request: Request, column: str, row: int) -> Any:
    """Return the value of a column in a row; an image is one of PIL, a sound a dict as of `datasets`."""
    rng, (name, *rest) = request.random(f"{column} {row}"), kind.split()
    numbers = [int(word) for word in rest if word.isdigit()]
    if name == "class":
        return row % numbers[0]
    if name == "image":
        return image(request.array(f"{column} {row}"), numbers, "".join(word for word in rest if word.isalpha()))
    if name == "audio":
        return {"array": request.array(row).normal(0, 0.1, _RATE).astype("float32"), "sampling_rate": _RATE}
    return {
        "int": lambda: row,
        "float": lambda: rng.gauss(0, 1),
        "string": lambda: text(rng),
        "chat": lambda: _chat(rng, [request.file]),
        "words": lambda: text(request.random(row), 12, 12).split(),
        "tags": lambda: [rng.randrange(*numbers) for _ in range(12)],
        "tokens": lambda: [rng.randrange(_VOCABULARY) for _ in range(128)],
        "answers": lambda: {"text": ["the"], "answer_start": [0]},
        "pairs": lambda: {language: text(rng) for language in rest or ("en", "de", "fr", "ro")},
        "path": lambda: f"{column}_{row:05}{next(iter(rest), _suffix_in(request.file) or '.png')}",
    }[name]()


def _rows(request: Request, options: Options, default: str, unknown: str) -> Iterator[dict[str, Any]]:
    columns = options.setdefault("columns", columns_of([request.file], default, unknown))
    for row in range(options.setdefault("samples", SAMPLES)):
        yield {name: value(kind, request, name, row) for name, kind in columns.items()}


def _text(path: str, request: Request, options: Options) -> None:
    rng = request.random()
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"{text(rng).capitalize()}.\n" for _ in range(options.setdefault("lines", _LINES)))


def _json(path: str, request: Request, options: Options) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(list(_rows(request, options, "instruction input output text", "string")), file)


def _json_lines(path: str, request: Request, options: Options) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in _rows(request, options, "text", "string"))


def _table(path: str, request: Request, options: Options) -> None:
    rows = list(_rows(request, options, "f0 f1 f2 f3 f4 f5 f6 f7 label", "float"))
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.endswith(".tsv") else ",")
        writer.writeheader()
        writer.writerows(rows)


def _parquet(path: str, request: Request, options: Options) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = list(_rows(request, options, "text label", "float"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _tokens(path: str, request: Request, options: Options) -> None:
    import numpy as np

    dtype = options.setdefault("dtype", str(np.dtype(request.hints.get("dtype") or "uint16")))
    count, below = options.setdefault("count", _TOKENS), options.setdefault("below", _VOCABULARY)
    rng, whole = request.array(), np.issubdtype(dtype, np.integer)
    numbers = rng.integers(0, below, count) if whole else rng.normal(0, 1, count)
    with open(path, "wb") as file:
        if options.setdefault("header", evidence.has_constant(request.file, _MAGIC)):
            header = np.zeros(256, np.int32)
            header[:3] = _MAGIC, 1, count
            file.write(header.tobytes())
        file.write(numbers.astype(dtype).tobytes())


def array(request: Request, options: Options, name: str) -> Any:
    """Return an array for a name: labels, token ids, images, or rows of numbers."""
    rng, word = request.array(name), os.path.basename(name).lower()
    samples = SAMPLES
    form: tuple[list[int], str, int]
    if re.search(r"label|target|(^|_)y(_|\.|$)|class", word):
        form = [samples], "int64", 2
    elif re.search(r"token|ids|text|corpus", word):
        form = [_TOKENS], "uint16" if word.endswith(".npy") else "int64", _VOCABULARY
    elif re.search(r"image|img|pixel", word):
        form = [samples, 32, 32, 3], "uint8", 256
    else:
        form = [samples, 16], "float32", 0
    shape, dtype, below = (
        options.setdefault(key, it) for key, it in zip(("shape", "dtype", "below"), form, strict=True)
    )
    numbers = rng.integers(0, below, shape) if below else rng.normal(0, 1, shape)
    return numbers.astype(dtype)


def _array(path: str, request: Request, options: Options) -> None:
    import numpy as np

    with open(path, "wb") as file:
        np.save(file, array(request, options, request.name))


def _arrays(request: Request, options: Options) -> dict[str, Any]:
    names = options.setdefault("arrays", {key: {} for key in evidence.keys(request.file) or ("x", "y")})
    return {name: array(request, own, name) for name, own in names.items()}


def _archive(path: str, request: Request, options: Options) -> None:
    import numpy as np

    with open(path, "wb") as file:
        np.savez(file, **_arrays(request, options))


def _hdf5(path: str, request: Request, options: Options) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, numbers in _arrays(request, options).items():
            file[name] = numbers


def _tensor(path: str, request: Request, options: Options) -> None:
    import torch

    torch.save(torch.from_numpy(array(request, options, request.name)), path)


def _vocabulary(path: str, request: Request, options: Options) -> None:
    characters = [chr(code) for code in (10, *range(32, 32 + _VOCABULARY - 1))]
    codes = {character: code for code, character in enumerate(characters)}
    with open(path, "wb") as file:
        pickle.dump({"vocab_size": _VOCABULARY, "stoi": codes, "itos": {v: k for k, v in codes.items()}}, file)


def _picture(path: str, request: Request, options: Options) -> None:
    size, mode = options.setdefault("size", [_SIDE, _SIDE]), options.setdefault("mode", "RGB")
    image(request.array(), size, mode).save(path)


def _sound(path: str, request: Request, options: Options) -> None:
    rate, seconds = options.setdefault("rate", _RATE), options.setdefault("seconds", 1)
    waves = (request.array().normal(0, 3000, rate * seconds)).clip(-32000, 32000).astype("int16")
    if path.endswith(".wav"):
        with wave.open(path, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(waves.tobytes())
    else:
        import soundfile

        soundfile.write(path, waves, rate)


def _shard(path: str, request: Request, options: Options) -> None:
    """Write samples with all usual parts: a script takes those that it decodes."""
    samples, classes = options.setdefault("samples", SAMPLES), options.setdefault("classes", 10)
    with tarfile.open(path, "w") as shard:
        for row in range(samples):
            rng, picture = request.random(row), image(request.array(row))
            parts = {"cls": str(row % classes).encode(), "txt": text(rng).encode()}
            parts["json"] = json.dumps({"label": row % classes, "text": text(rng)}).encode()
            for suffix, codec in (("jpg", "JPEG"), ("png", "PNG")):
                picture.save(encoded := BytesIO(), codec)
                parts[suffix] = encoded.getvalue()
            for suffix, content in parts.items():
                entry = tarfile.TarInfo(f"{row:06}.{suffix}")
                entry.size = len(content)
                shard.addfile(entry, BytesIO(content))


_PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
FORMS: Mapping[str, tuple[str, Maker]] = {
    ".txt": ("lines of text", _text),
    ".json": ("a list of rows", _json),
    **dict.fromkeys((".jsonl", ".ndjson"), ("rows of JSON", _json_lines)),
    **dict.fromkeys((".csv", ".tsv"), ("a table", _table)),
    ".parquet": ("a table", _parquet),
    ".bin": ("token ids", _tokens),
    ".npy": ("an array", _array),
    ".npz": ("arrays", _archive),
    **dict.fromkeys((".h5", ".hdf5"), ("arrays", _hdf5)),
    **dict.fromkeys((".pt", ".pth"), ("a tensor", _tensor)),
    ".pkl": ("a vocabulary of characters", _vocabulary),
    **dict.fromkeys(_PICTURES, ("an image", _picture)),
    **dict.fromkeys((".wav", ".flac"), ("a sound", _sound)),
    ".tar": ("a shard of samples", _shard),
}
"""The end of a file's name -> its form, and the maker."""


def files_of(name: str) -> int:
    """Return how many files a directory of such files has: many, if each is one sample."""
    return SAMPLES if name.endswith((*_PICTURES, ".wav", ".flac")) else 8


_STATE = re.compile(
    r"ckpt|checkpoint|model|weight|best|last|latest|epoch|resume|snapshot|optim|state|pretrained|adapter|scheduler|cache"
)
_DATA = re.compile(r"data|train|val|test|dev|token|corpus|text|sample|feature|image|label|input|shard|fineweb|wiki")
_SETTINGS = re.compile(
    r"conf|setting|vocab|args|tokenizer|token|param|schema|class|index|manifest|meta|result|log|stat"
)


def form_of(path: str) -> tuple[str, Maker] | None:
    """Return the form of a file, from its name; None if the name shows none, or it may be a checkpoint or settings."""
    name = os.path.basename(path).lower()
    suffix = os.path.splitext(name)[1]
    if suffix in (".pt", ".pth") and (_STATE.search(name) or not _DATA.search(path.lower())):
        return None
    if suffix in (".bin", ".npz", ".h5", ".hdf5") and _STATE.search(name) and not _DATA.search(name):
        return None
    if (suffix == ".json" and _SETTINGS.search(name)) or (suffix == ".pkl" and name != "meta.pkl"):
        return None
    return FORMS.get(suffix)


def may_be_state(path: str) -> bool:
    """Return whether a path may be a checkpoint, which is not data."""
    return _STATE.search(os.path.basename(path).lower()) is not None and form_of(path) is None


def _suffix_in(file: str) -> str | None:
    """Return the end of names of data files that a source file mentions first."""
    for word in evidence.strings(file):
        match = re.search(r"(?:^|\*)(\.[a-z0-9]+)$", word)
        if match and match[1] in FORMS and match[1] not in (".pt", ".pth", ".pkl", ".json"):
            return match[1]
    return None


def tree(path: str, request: Request, options: Options) -> None:
    """Write a directory of files: in a directory for each class, or all together (`classes` is 0)."""
    suffix = str(options.setdefault("suffix", request.hints.get("suffix") or _suffix_in(request.file)))
    classes = options.setdefault("classes", request.hints.get("classes", 4))
    samples = options.setdefault("samples", files_of(suffix))
    for row in range(samples):
        directory = os.path.join(path, f"class_{row % classes}") if classes else path
        os.makedirs(directory, exist_ok=True)
        name = f"{row:05}{suffix}"
        FORMS[suffix][1](os.path.join(directory, name), Request(f"{request.name}/{name}", "", request.file, 0), {})


def tree_of(request: Request) -> Maker | None:
    """Return the maker of a directory that a script lists; None if its source names no files of a known form."""
    return tree if request.hints.get("suffix") or _suffix_in(request.file) else None
