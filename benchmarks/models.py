"""Many models in each kind of parallelism: `python benchmarks/models.py [TARGET ...] [--gpus=4] [--time=300s]`.

Runs `mgpu-check model` for each target, a process for two processors, and prints a matrix of models and ways. The default
targets need transformers and diffusers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TARGETS = [
    *("transformers:LlamaForCausalLM", "transformers:Qwen3ForCausalLM", "transformers:MixtralForCausalLM"),
    *("transformers:GPT2LMHeadModel", "transformers:BertForSequenceClassification"),
    *("transformers:T5ForConditionalGeneration", "transformers:ViTForImageClassification"),
    *("transformers:ResNetForImageClassification", "transformers:MambaForCausalLM"),
    *("transformers:WhisperForConditionalGeneration", "diffusers:UNet2DModel"),
]
SHORT = {"equal": "=", "differs": "DIFFERS", "raises": "RAISES", "not applicable": "-"}


def examined(target: str, options: list[str], reports: Path) -> tuple[dict[str, str], float, str]:
    """Return way -> status, the seconds, and the last lines of the output if there is no report."""
    report, started = reports / f"{target.replace(':', '-')}.json", time.monotonic()
    command = [sys.executable, "-m", "mgpu_check", "model", target, "--simulate", f"--report={report}", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - started
    if not report.exists():
        return {}, seconds, "\n".join((done.stdout + done.stderr).splitlines()[-3:])
    results = json.loads(report.read_text())["results"]
    return {row["way"]: SHORT.get(row["status"], row["status"]) for row in results}, seconds, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS)
    parser.add_argument("--gpus", default="4")
    parser.add_argument("--time", default="300s")
    parser.add_argument("--reports", type=Path, default=Path(tempfile.mkdtemp()), help="directory of the JSON reports")
    arguments = parser.parse_args()
    options = [f"--gpus={arguments.gpus}", f"--time={arguments.time}"]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        rows = list(pool.map(lambda target: examined(target, options, arguments.reports), arguments.targets))
    ways = list(dict.fromkeys(way for statuses, _, _ in rows for way in statuses))
    print(" ".join([f"{'model':48}", *(f"{way:>9}" for way in ways), "  seconds"]))
    for target, (statuses, seconds, problem) in zip(arguments.targets, rows, strict=True):
        print(" ".join([f"{target:48}", *(f"{statuses.get(way, '?'):>9}" for way in ways), f"{seconds:9.0f}"]))
        if problem:
            print(problem)
    print(f"reports: {arguments.reports}")


if __name__ == "__main__":
    main()
