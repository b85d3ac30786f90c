"""The faults of the trials. Each method of Faults makes one, and first registers how to undo it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.verdict.cluster import RATE, Cluster
from bench.verdict.trials import NODES, SLOW_FILES

BLKIO = Path("/sys/fs/cgroup/blkio")
PERIOD, STOPPED = 0.2, 0.09  # seconds of a duty cycle, and of its part in which a rank is stopped


class Faults:
    """Makes faults. `ranks`: {machine: process ID of its rank, as this machine knows it}."""

    def __init__(self, cluster: Cluster, ranks: Mapping[int, int]):
        self.cluster, self.ranks = cluster, ranks
        self.undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def make(self, *faults: tuple[str, Mapping[str, Any]]) -> Iterator[None]:
        """Make these faults (methods and their arguments) for the time of a `with` block."""
        with self.undo:
            for method, words in faults:
                getattr(self, method)(**words)
            yield

    def nothing(self) -> None:
        pass

    def rate(self, mbit: int, node: int | None = None) -> None:
        self.undo.callback(self.cluster.shape, RATE)
        self.cluster.shape(f"{mbit}mbit", node)

    def loss(self, percent: float, node: int | None = None) -> None:
        """Drop packets that come to all machines; with `node`, those that it sends or receives."""
        for each in NODES:
            # Each machine drops what it receives, so the others drop what `node` sends.
            sender = f"ip saddr {self.cluster.nodes[node - 1].address}" if node else ""
            drop = f"numgen random mod 1000 < {10 * percent:.0f} drop"
            rule = drop if each == node else f"{sender} {drop}"
            chain = f"chain in {{ type filter hook input priority 0; {rule}; }}"
            self.cluster.run_in_network(each, "nft", f"table ip trial {{ {chain}; }}")
            self.undo.callback(self.cluster.run_in_network, each, "nft", "delete table ip trial")

    def half_duplex(self, mbit: int, percent: float, node: int) -> None:
        self.rate(mbit, node)
        self.loss(percent, node)

    def write(self, node: int | None, path: str, text: str, usual: str = "") -> None:
        """Write a file of one machine or of all. `usual`: its content without the fault."""
        for each in [node] if node else NODES:
            self.undo.callback(self.cluster.write, each, path, usual)
            self.cluster.write(each, path, text)

    def slow_files(
        self, milliseconds: float, node: int | None = None, computes: bool = False
    ) -> None:
        """Delay each file behind slow_files.c, by waiting or by computing."""
        words = f"{'burn ' if computes else ''}{1000 * milliseconds:.0f}\n"
        self.write(node, f"{SLOW_FILES}.delay", words, "0\n")

    def change(self, node: int | None = None, **values: Any) -> None:
        """Change values that workload.py reads. Values that another fault changed stay."""
        for each in [node] if node else NODES:
            before = self.cluster.path(each, "/srv/trial.json")
            usual = before.read_text() if before.exists() else ""
            changed = {**json.loads(usual or "{}"), **values}
            self.write(each, "/srv/trial.json", json.dumps(changed), usual)

    def throttle(self, what: str, bytes_per_second: float, nodes: Sequence[int]) -> None:
        """Limit what the processes of these ranks together read or write on the lab's disk."""
        device = Path("/var/lib/tandem-lab").stat().st_dev
        disk = f"{os.major(device)}:{os.minor(device)}"
        group = BLKIO / f"verdict-{os.getpid()}"
        group.mkdir(exist_ok=True)
        self.undo.callback(empty, group)
        for pid in (self.ranks[node] for node in nodes):
            for each in (pid, *children(pid)):
                (group / "cgroup.procs").write_text(str(each))
        limit = group / f"blkio.throttle.{what}_bps_device"
        self.undo.callback(limit.write_text, f"{disk} 0")
        limit.write_text(f"{disk} {bytes_per_second:.0f}")

    def slow_disk(self, megabytes: float) -> None:
        self.throttle("read", 1e6 * megabytes * len(NODES), NODES)

    def frozen_disk(self, node: int) -> None:
        self.throttle("read", 1, [node])

    def slow_writes(self, megabytes: float) -> None:
        self.throttle("write", 1e6 * megabytes * len(NODES), NODES)

    def busy_disk(self) -> None:
        """Read this machine's disk without pause. No rank waits for that."""
        device = Path("/var/lib/tandem-lab").stat().st_dev
        disk = f"/dev/block/{os.major(device)}:{os.minor(device)}"
        line = f"while dd if={disk} of=/dev/null bs=4M iflag=direct; do :; done"
        process = subprocess.Popen(
            ["sh", "-c", line], start_new_session=True, stderr=subprocess.DEVNULL
        )
        self.undo.callback(process.wait)
        self.undo.callback(os.killpg, process.pid, signal.SIGKILL)

    def duty_cycle(self, node: int, stopped: float = STOPPED) -> None:
        """Stop a rank for a part of each period."""
        over, pid = threading.Event(), self.ranks[node]

        def cycle() -> None:
            with contextlib.suppress(ProcessLookupError):
                while not over.wait(PERIOD - stopped):
                    os.kill(pid, signal.SIGSTOP)
                    over.wait(stopped)
                    os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=cycle)
        thread.start()
        self.undo.callback(thread.join)
        self.undo.callback(over.set)

    def neighbours(self, node: int, programs: int, burn: float = 0.06) -> None:
        """Run so many programs on one processor with a machine's rank, and the other ranks on other
        processors. All ranks compute for `burn` seconds per step."""
        self.change(burn=burn)
        last = max(os.sched_getaffinity(0))
        for each, pid in self.ranks.items():
            self.undo.callback(pin, pid, f"0-{last}")
            pin(pid, f"{last}" if each == node else f"0-{last - 1}")
        for _ in range(programs):
            # The kernel gives each session an equal share of the processor.
            busy = ["taskset", "-c", str(last), "sh", "-c", "while :; do :; done"]
            process = subprocess.Popen(busy, start_new_session=True)
            self.undo.callback(process.wait)
            self.undo.callback(process.kill)


def empty(group: Path) -> None:
    """Remove a group of blkio. Its processes go back to the root group."""
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (BLKIO / "cgroup.procs").write_text(pid)
    group.rmdir()


def pin(pid: int, processors: str) -> None:
    """Let all threads of a process run on these processors only."""
    words = ["taskset", "-acp", processors, str(pid)]
    subprocess.run(words, check=False, capture_output=True)


def children(pid: int) -> list[int]:
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
