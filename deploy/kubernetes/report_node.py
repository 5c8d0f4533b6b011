"""Report the verdict of ``mgpu-check accept`` to Kubernetes, as a condition of the node that this pod runs on.

    report_node.py [--cordon] VERDICT_FILE

The condition GpusAccepted is True for ACCEPTED, False for REJECTED, and Unknown without a verdict. ACCEPTED takes the
taint mgpu-check.io/not-accepted away. REJECTED makes the node unschedulable with ``--cordon``; it never becomes
schedulable by this program. Needs the standard library only, and the variable NODE_NAME.

Exit code: 0 after ACCEPTED and REJECTED; 1 without a verdict, or if the API refuses, so that an init container is tried
again; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CONDITION = "GpusAccepted"
TAINT = "mgpu-check.io/not-accepted"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TRIES = 5  # another controller may change the node between our reading and writing

STATUS = {"ACCEPTED": "True", "REJECTED": "False"}


class Api:
    """The Kubernetes API, with the service account of this pod.

    Args:
        url: the URL of the server.
        account: directory with the files ``token`` and ``ca.crt``.
    """

    def __init__(self, url: str, account: Path) -> None:
        self._url = url
        self._token = (account / "token").read_text().strip()
        certificate = account / "ca.crt"
        self._context = ssl.create_default_context(cafile=str(certificate)) if certificate.exists() else None

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """Call the API, and return its answer.

        Raises:
            urllib.error.HTTPError: the API refuses; its ``code`` is 409 if the node has changed meanwhile.
        """
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind},
        )
        with urllib.request.urlopen(request, timeout=30, context=self._context) as answer:
            return json.load(answer)


def verdict_of(path: Path) -> tuple[str, str]:
    """Return the word of a verdict file, and its headline; "" and the reason without a verdict."""
    try:
        word, _, headline = path.read_text().splitlines()[:3]
    except OSError as error:
        return "", f"no verdict: {path} cannot be read ({error.strerror})"
    except ValueError:
        return "", f"no verdict: {path} is no file of mgpu-check accept --verdict-file"
    return word, headline


def report(api: Api, node: str, word: str, headline: str, cordon: bool) -> None:
    """Set the condition of the node, and its taints and state according to the verdict."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    path = f"/api/v1/nodes/{node}"
    before = api.call("GET", path)["status"].get("conditions") or []
    status = STATUS.get(word, "Unknown")
    # The time of the last change stays as long as the status does.
    since = next(
        (one["lastTransitionTime"] for one in before if (one["type"], one["status"]) == (CONDITION, status)), now
    )
    condition = {
        "type": CONDITION,
        "status": status,
        "reason": {"ACCEPTED": "Accepted", "REJECTED": "Rejected"}.get(word, "NoVerdict"),
        "message": headline[:1024],
        "lastHeartbeatTime": now,
        "lastTransitionTime": since,
    }
    # This kind of patch joins conditions by their type.
    patch = {"status": {"conditions": [condition]}}
    api.call("PATCH", f"{path}/status", patch, "application/strategic-merge-patch+json")
    if word not in STATUS or (word == "REJECTED" and not cordon):
        return
    for attempt in range(TRIES):
        seen = api.call("GET", path)
        spec: dict[str, Any] = {"unschedulable": True}
        if word == "ACCEPTED":
            taints = seen["spec"].get("taints") or []
            kept = [taint for taint in taints if taint["key"] != TAINT]
            if kept == taints:
                return
            spec = {"taints": kept}
        # With the version that was read, the API refuses to overwrite what others have changed meanwhile.
        body = {"metadata": {"resourceVersion": seen["metadata"]["resourceVersion"]}, "spec": spec}
        try:
            api.call("PATCH", path, body, "application/merge-patch+json")
            return
        except urllib.error.HTTPError as error:
            if error.code != 409 or attempt == TRIES - 1:
                raise


def main() -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="report_node.py", description="Report a verdict as a condition of this node.")
    parser.add_argument("file", type=Path, metavar="VERDICT_FILE", help="written by accept --verdict-file")
    parser.add_argument("--cordon", action="store_true", help="make a REJECTED node unschedulable")
    parser.add_argument("--account", type=Path, default=ACCOUNT, help=argparse.SUPPRESS)
    parser.add_argument("--server", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    node = os.environ.get("NODE_NAME")
    if not node:
        print("report_node.py: NODE_NAME is not set; set it from spec.nodeName", file=sys.stderr)
        return 2
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    word, headline = verdict_of(options.file)
    try:
        api = Api(options.server or f"https://{host}:{port}", options.account)
        report(api, node, word, headline, options.cordon)
    except OSError as error:  # HTTPError is one
        print(f"report_node.py: node {node}: {word or 'no verdict'}; the API refuses: {error}", file=sys.stderr)
        return 1
    print(f"node {node}: {headline}")
    return 0 if word in STATUS else 1


if __name__ == "__main__":
    sys.exit(main())
