"""Measure the driver of a launched run with many agents: ``python benchmarks/agents.py [AGENTS ...]`` (default: 64 1024 4096).

The agents are threads of a few processes on this machine. They prove the key, report, launch a process that connects
at once, and answer, as real ones do, but they start no interpreter. So the figures are those of the driver alone.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from concurrent.futures import wait
from typing import Any

from mgpu_check.engine.remote.agent import connect
from mgpu_check.engine.remote.connections import Connections, Lines, line
from mgpu_check.engine.remote.credentials import Key, Stranger
from mgpu_check.engine.remote.meeting import Announced, listen_at

KEY = Key(b"k" * 32, "this program")
PROCESSES = 4
ANSWER = "x" * 20_000  # as long as the stacks of a rank in a training step
TIMEOUT = 300.0


def agent(driver: Announced, rank: int, tries: Any) -> None:
    while True:
        with tries.get_lock():
            tries.value += 1
        try:
            connection = connect(driver)
            break
        except (OSError, Stranger):
            time.sleep(0.1)
    told = {"rank": rank, "host": f"host{rank // 8}", "final": False, "launcher": "torchrun"}
    connection.settimeout(None)
    connection.sendall(line({"agent": told}))
    lines, processes = Lines(), []  # whose connections stay open
    while data := connection.recv(1 << 16):
        lines.feed(data)
        while (message := lines.next()) is not None:
            if message["do"] == "end":
                connection.close()
                return
            if message["do"] == "launch":
                processes.append(launched(connection, driver, rank, message["id"]))
            else:
                connection.sendall(line({"event": "answer", "request": message["request"], "value": ANSWER}))


def launched(connection: socket.socket, driver: Announced, rank: int, number: int) -> socket.socket | None:
    try:
        process = connect(driver, attempts=3)
    except (OSError, Stranger) as error:
        connection.sendall(line({"event": "failed", "id": number, "text": str(error)}))
        return None
    process.sendall(line({"launch": number, "rank": rank}))
    connection.sendall(line({"event": "launched", "id": number, "pid": 1}))
    return process


def agents(driver: Announced, ranks: range, tries: Any) -> None:
    threading.stack_size(1 << 17)
    threads = [threading.Thread(target=agent, args=(driver, rank, tries)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(count: int) -> dict[str, float]:
    """Return the seconds of each part of a run with `count` agents, and what the driver then needs."""
    connections = Connections(listen_at("127.0.0.1"), KEY, count, None, TIMEOUT)
    connections.start()
    driver = Announced("127.0.0.1", connections.port, "", KEY)
    tries = multiprocessing.Value("i", 0)
    parts = [range(first, count, PROCESSES) for first in range(PROCESSES)]
    processes = [multiprocessing.Process(target=agents, args=(driver, part, tries)) for part in parts]
    times = [time.perf_counter()]
    for one in processes:
        one.start()
    missing = connections.await_agents(range(count), TIMEOUT)
    assert not missing, f"{len(missing)} of {count} agents have not come"
    times.append(time.perf_counter())
    asked = [connections.launch(rank) for rank in range(count)]
    wait([future for _, _, future in asked], TIMEOUT)
    failed = sum(future.exception() is not None for _, _, future in asked)
    times.append(time.perf_counter())
    answers = [connections.ask(one, number, "stacks") for one, number, _ in asked]
    assert sum(len(answer.result(TIMEOUT)) for answer in answers) == count * len(ANSWER)
    times.append(time.perf_counter())
    files = len(os.listdir("/proc/self/fd"))
    connections.finish(0)
    times.append(time.perf_counter())
    for one in processes:
        one.join()
    parts_of = dict(zip(("join", "launch", "stacks", "end"), map(float.__sub__, times[1:], times), strict=True))
    return {**parts_of, "failed launches": failed, "attempts to join": tries.value, "open files": files}


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for count in map(int, sys.argv[1:] or (64, 1024, 4096)):
        figures = measure(count)
        print(f"{count:>5} agents  " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
