"""`mgpu-check model TARGET`: find out under which kinds of parallelism a model trains as on one device."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import pytest

import mgpu_check.models
from mgpu_check.cli.codes import RIGHT, WRONG_USAGE
from mgpu_check.cli.suite import command_line, misuse, on_all_gpus, refuse_workers, run
from mgpu_check.models.application import WAYS
from mgpu_check.settings import all_options

_OWN = {
    "--batch": "train:make_batch",
    "--loss": "train:loss",
    "--time": "60s",
    "--ways": "ddp,fsdp2",
    "--report": "model.md",
    "--golden": "model.json",
}
"""Options of this command that the plugin calls ``--model-...``, each with an example value."""

_EXAMPLE = "transformers:Qwen3ForCausalLM or train.py:build"
_HELP = f"""\
usage: mgpu-check model TARGET [--gpus=N|all] [--simulate] [--ways=WAY,...] [--batch=MODULE:FUNCTION]
                        [--loss=MODULE:FUNCTION] [--time=TIME] [--report=FILE.json|.md] [--golden=FILE.json]
                        [pytest arguments]

Trains a model in each way that applies, on one device and on several, compares the results, and prints a table.

TARGET is package.module:NAME or FILE.py:NAME, a class or a function without arguments, or a small random model of a
library: transformers:Qwen3ForCausalLM, torchvision:resnet18, timm:NAME, diffusers:CLASS. Nothing is downloaded.

  --ways    ways to try: {", ".join(WAYS)}
            (default: all that apply; own: a function parallelize(model, mesh) beside the model, and MESH)
  --batch   function(n) that returns n samples: a mapping of arguments of the model, or (inputs, target)
            (default: a function `batch` beside the model, or shapes that the model accepts)
  --loss    function(output, target) that returns the mean loss (default: a function `loss` beside the model, the loss
            that the model returns, or the difference from a drawn target)
  --time    begin nothing after this time (default: 300s); what was not tried is listed
  --report  write the table to a file
  --golden  compare the table with this file, or write it if it is missing; the exit code is 1 if a way has changed

exit codes:
  0 equal in each way that applies   1 a way fails   2 a way was not tried or not compared, or interrupted
  3 internal error   4 wrong usage
"""


def main(argv: Sequence[str]) -> int:
    """Examine the model that `argv` names, and return the exit code of the verdict."""
    arguments = list(argv)
    if "-h" in arguments or "--help" in arguments:
        print(_HELP, end="")
        return RIGHT
    named = arguments and not arguments[0].startswith("-")
    if refused := misuse(arguments, _OWN) if named else f"the first argument is the model, such as {_EXAMPLE}":
        print(f"mgpu-check model: {refused}", file=sys.stderr)
        return WRONG_USAGE
    target, *words = arguments
    os.environ[all_options()["model_target"].variable] = target  # which the process that ranks are forked from inherits
    typed = [f"--model-{word[2:]}" if word.partition("=")[0] in _OWN else word for word in words]
    words = on_all_gpus(typed)
    plugins = [_OneProcess(), command_line(("model", target), words, typed, "--model-")]
    quiet = ["-rN", "--show-capture=no"]  # the table says what failed, and errors of ranks have their own tracebacks
    return run([*quiet, *words], plugins, mgpu_check.models, ["mgpu_check.models.preloaded"])


class _OneProcess:
    """A pytest plugin of one run, which refuses workers of pytest-xdist: the ways share a clock."""

    def pytest_configure(self, config: pytest.Config) -> None:
        refuse_workers(config, "mgpu-check model: the ways run in one process")
