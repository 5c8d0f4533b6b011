"""Manifests are valid, and the verdict reaches the node's condition, taints and state."""

from __future__ import annotations

import copy
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DIRECTORY = Path(__file__).parents[2] / "deploy" / "kubernetes"
PROGRAM = DIRECTORY / "report_node.py"
OTHER = {"key": "other", "effect": "NoSchedule"}
TAINT = {"key": "mgpu-check.io/not-accepted", "effect": "NoSchedule"}


class Server(http.server.ThreadingHTTPServer):
    """A stub of the Kubernetes API with one node.

    Attributes:
        node: the node, as the API has it.
        conflicts: number of further patches of the node that another controller forestalls.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.node: dict[str, Any] = {
            "metadata": {"resourceVersion": "1"},
            "spec": {"taints": [OTHER, TAINT]},
            "status": {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "t0"}]},
        }
        self.conflicts = 0

    @property
    def condition(self) -> dict[str, str]:
        (found,) = (one for one in self.node["status"]["conditions"] if one["type"] == "GpusAccepted")
        return found


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/api/v1/nodes/gpu-17" else 404)

    def do_PATCH(self) -> None:
        node = self.server.node
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/v1/nodes/gpu-17/status":
            assert self.headers["Content-Type"] == "application/strategic-merge-patch+json"
            new = {one["type"]: one for one in body["status"]["conditions"]}
            conditions = node["status"]["conditions"]
            node["status"]["conditions"] = [one for one in conditions if one["type"] not in new] + [*new.values()]
            return self._answer(200)
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        if self.server.conflicts:
            self.server.conflicts -= 1
            node["metadata"]["resourceVersion"] += "1"
            node["spec"]["taints"] = [*node["spec"]["taints"], {"key": f"late-{self.server.conflicts}"}]
        if body["metadata"]["resourceVersion"] != node["metadata"]["resourceVersion"]:
            return self._answer(409)
        node["spec"] |= body["spec"]
        return self._answer(200)

    def _answer(self, code: int) -> None:
        if self.headers["Authorization"] != "Bearer secret":
            code = 401
        content = json.dumps(self.server.node if code == 200 else {"message": "no"}).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Write no log."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)  # looks whether to end
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def report(server: Server, tmp_path: Path) -> Any:
    (tmp_path / "token").write_text("secret\n")

    def report(word: str, *options: str, code: int = 0, **variables: str) -> str:
        file = tmp_path / "verdict"
        file.unlink(missing_ok=True)
        if word:
            file.write_text(f"{word}\nexit code: 0\n{word}: GPU 1\nhost: {word}\n")
        url = f"--server=http://127.0.0.1:{server.server_port}"
        done = subprocess.run(
            [sys.executable, PROGRAM, f"--account={tmp_path}", url, *options, file],
            env={**os.environ, "NODE_NAME": "gpu-17", **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return report


def documents() -> Iterator[Any]:
    for path in sorted(DIRECTORY.glob("*.yaml")):
        text = path.read_text().replace("NODE", "gpu-17").replace("IMAGE", "registry.example.com/mgpu-check")
        for number, document in enumerate(yaml.safe_load_all(text)):
            yield pytest.param(document, id=f"{path.stem}-{number}-{document['kind']}")


@pytest.mark.parametrize("document", list(documents()))
def test_manifests_follow_the_schema(document: Any) -> None:
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(document, version, strict=True)
    spoiled = copy.deepcopy(document)
    spoiled["spek"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(spoiled, version, strict=True)


def test_an_accepted_node_loses_our_taint_only(server: Server, report: Any) -> None:
    report("ACCEPTED")
    assert server.node["spec"] == {"taints": [OTHER]}
    assert (server.condition["status"], server.condition["reason"]) == ("True", "Accepted")
    assert [one["type"] for one in server.node["status"]["conditions"]] == ["Ready", "GpusAccepted"]


def test_a_rejected_node_is_cordoned_on_request(server: Server, report: Any) -> None:
    report("REJECTED")
    assert server.condition["status"] == "False" and "unschedulable" not in server.node["spec"]
    assert server.condition["message"] == "REJECTED: GPU 1"
    report("REJECTED", "--cordon")
    assert server.node["spec"] == {"taints": [OTHER, TAINT], "unschedulable": True}


@pytest.mark.parametrize("word", ["INCONCLUSIVE", ""])
def test_a_node_without_a_verdict_is_tried_again(server: Server, report: Any, word: str) -> None:
    report(word, "--cordon", code=1)
    assert server.condition["status"] == "Unknown" and server.node["spec"] == {"taints": [OTHER, TAINT]}


def test_what_others_change_meanwhile_stays(server: Server, report: Any) -> None:
    server.conflicts = 2
    report("ACCEPTED")
    assert [taint["key"] for taint in server.node["spec"]["taints"]] == ["other", "late-1", "late-0"]


def test_the_time_of_the_last_change_stays_with_the_status(server: Server, report: Any) -> None:
    report("ACCEPTED")
    server.condition["lastTransitionTime"] = "then"
    report("ACCEPTED")
    assert server.condition["lastTransitionTime"] == "then"
    report("REJECTED")
    assert server.condition["lastTransitionTime"] != "then"


def test_an_api_that_refuses_is_named(report: Any, tmp_path: Path) -> None:
    assert "the API refuses: HTTP Error 404" in report("ACCEPTED", code=1, NODE_NAME="other")
    (tmp_path / "token").write_text("wrong")
    assert "node gpu-17: REJECTED; the API refuses: HTTP Error 401" in report("REJECTED", code=1)
    assert "NODE_NAME is not set" in report("ACCEPTED", code=2, NODE_NAME="")


def test_the_program_needs_nothing_that_is_not_in_its_image() -> None:
    roots = {
        line.split()[1].partition(".")[0]
        for line in PROGRAM.read_text().splitlines()
        if line.startswith(("import", "from"))
    }
    assert roots <= set(sys.stdlib_module_names)
