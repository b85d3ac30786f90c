"""A run of the lab under test: its processes, what it says, what it leaves on the nodes.

The nodes' processes are this machine's, too, and have its clock: what a guard wrote down in its
CLOCK_MONOTONIC can be compared with the moment of a fault, whatever else this machine does.
"""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from tests.unit.launcher.guard_client import alive

CHECKOUT = Path(__file__).resolve().parents[2]
PATIENCE = 300  # seconds after which a wait has failed


class Running:
    """One `python -m launcher train` on the control node; `mark` is in its run_env."""

    def __init__(self, lab, folder: Path, mark: str, *words: str):
        self.lab, self.mark, self.files = lab, mark, folder
        self.output = (folder / "output").open("a+")
        self.start(*words)

    def start(self, *words: str) -> None:
        argv = ["python", "-m", "launcher", "train", *words]
        self.process = subprocess.Popen(
            self.lab.argv("exec", "--", *argv),
            cwd=CHECKOUT,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def said(self) -> str:
        return Path(self.output.name).read_text()

    def wait_for(self, pattern: str, times: int = 1) -> None:
        """Waits until it has printed this so many times."""
        limit = time.monotonic() + PATIENCE
        while len(re.findall(pattern, self.said())) < times:
            assert self.process.poll() is None and time.monotonic() < limit, self.said()
            time.sleep(0.05)

    def end(self, seconds: float = PATIENCE) -> int:
        """Waits for its end and returns its exit code."""
        return self.process.wait(seconds)

    @property
    def name(self) -> str:
        return re.search(r"^tandem: run (\S+), attempt", self.said(), re.M).group(1)

    @property
    def folder(self) -> Path:
        return CHECKOUT / "runs" / self.name

    @property
    def controller(self) -> int:
        return int((self.folder / "controller.pid").read_text().split()[0])

    def attempts(self) -> list[dict]:
        return json.loads((self.folder / "attempts.json").read_text())["attempts"]

    def processes(self) -> list[int]:
        """All of its processes on the nodes, including the guards."""
        return sorted({*alive(self.mark), *self.guards()})

    def guards(self) -> list[int]:
        """The guards, found by their unit's name, which contains this run's name."""
        unit, lab = f"tandem-{self.name}-", f"/{self.lab.name}/"
        found = [pid for pid, words in commands() if unit in " ".join(words)]
        # A run that began elsewhere in the same second has the same name.
        return [pid for pid in found if lab in read(pid, "cgroup")]

    def pids(self, node: int) -> dict[str, int]:
        """Guard, launch and worker of a node."""
        found = {}
        for pid in alive(self.mark):
            words = command(pid)
            if f"TANDEM_NODE=node{node}" not in environment(pid):
                continue
            if "torch.distributed.launch" in words:
                found["launch"], found["guard"] = pid, parent(pid)
            elif "trainer" in words and "supervisor.py" in " ".join(command(parent(pid))):
                found["worker"] = pid
        return found

    def fetch(self, nodes: list[int], target: Path) -> list[Path]:
        """The run folders of these nodes, copied below `target`: records, samples."""
        folders = []
        for node in nodes:
            folder = target / f"node{node}"
            line = f"cd tandem/runs/{self.name} 2>/dev/null && tar -cf - nodes samples || true"
            packed = self.lab("ssh", str(node), "--", line, text=False).stdout
            if packed:
                folder.mkdir(parents=True, exist_ok=True)
                # The filters of tarfile came with Python 3.11.4, and Debian 12 has 3.11.2.
                subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
                folders.append(folder)
        return folders

    def close(self) -> None:
        """Ends what a failed test has left running."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.processes() if "attempt 1" in self.said() else []:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.output.close()


def ended(folders: list[Path], attempt: int) -> dict[str, float]:
    """{host: when its part had ended and none of it lived}, by the node's monotonic clock."""
    found = {}
    for folder in folders:
        for path in folder.glob(f"nodes/*/machine.{attempt}.jsonl"):
            last = json.loads(path.read_text().splitlines()[-1])
            if last["kind"] == "exit":
                found[path.parent.name] = last["mono_end"]
    return found


def commands() -> list[tuple[int, list[str]]]:
    """Pid and command line of every process."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [(pid, command(pid)) for pid in pids]


def command(pid: int) -> list[str]:
    return read(pid, "cmdline").split("\0")


def environment(pid: int) -> list[str]:
    return read(pid, "environ").split("\0")


def parent(pid: int) -> int:
    fields = read(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def read(pid: int, name: str) -> str:
    """A file of a process; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
