"""Runs on four machines of the lab in which faults begin and end: what test_verdict.py measures.

The nodes' processes are this machine's, too: faults that need the kernel (processors, disks) are
made from here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.verdict.trials import SETTLE, WINDOW, WINDOWS, Trial, trials
from lab.plan import Node
from report.status import Follower
from tests.lab.chaos_run import CHECKOUT, Running, commands, read
from tests.lab.faults.model import USUAL

STANDINS = CHECKOUT / "tests/lab/faults"
NODES = (1, 2, 3, 4)
BLKIO, CPU = (Path("/sys/fs/cgroup") / name for name in ("blkio", "cpu"))
# Options of all runs: of short steps on one thread, that nothing but the fault makes longer.
ARGS = (
    *("--device", "cpu", "--augment", "none", "--lr", "0.0001", "--warmup_epochs", "0"),
    *("--momentum", "0", "--weight_decay", "0"),
)
TRIAL = ("--trial", "3000")  # until it is stopped


class Setting(NamedTuple):
    """What a run has besides: its data, images a step and machine, options."""

    data: str
    batch: int
    args: tuple[str, ...]


SETTINGS = {
    "timed": Setting("tiny", 2, (*TRIAL, "--workers", "0", "--image_size", "32")),
    "disk": Setting("disk", 4, (*TRIAL, "--workers", "1", "--image_size", "32")),
    "share": Setting("share", 4, (*TRIAL, "--workers", "1", "--image_size", "32")),
    "decode": Setting("large", 8, (*TRIAL, "--workers", "1", "--image_size", "224")),
    "checkpoint": Setting(
        "tiny", 2, ("--workers", "0", "--image_size", "32", "--checkpoint_every", "8")
    ),
}
# Pictures of a data set: (number, side); all are links to a few, but for the disk's, which are to
# be read from it and not from memory.
PICTURES = {"tiny": (6000, 8), "disk": (6000, 160), "share": (6000, 600), "large": (600, 2400)}
MAKE = """
import os, sys
import numpy as np
from PIL import Image
name, count, side, each = sys.argv[1], *map(int, sys.argv[2:])
random = np.random.default_rng(1)
for split, number in (("train", count), ("val", 8)):
    for label in range(2):
        folder = f"{name}/{split}/{label}"
        os.makedirs(folder)
        for place in range(number // 2):
            path = f"{folder}/{place}.jpg"
            if place < 4 or each:
                noise = random.integers(0, 255, (side, side, 3), np.uint8)
                Image.fromarray(noise).save(path, quality=90)
            else:
                os.link(f"{folder}/{place % 4}.jpg", path)
"""


class Cluster:
    """Four machines of a lab that have pictures; `python`: their environment's."""

    def __init__(self, lab, python: str, scratch: Path):
        self.lab, self.python, self.scratch = lab, python, scratch
        self.loops: list[str] = []
        self.prepared: set[str] = set()
        self.nodes = [Node(lab.name, number) for number in NODES]
        for node in self.nodes:
            # Where BBR is the default it goes on by the rate that it saw before a link was shaped.
            line = ["sysctl", "-q", "-w", "net.ipv4.tcp_congestion_control=reno"]
            subprocess.run(["ip", "netns", "exec", node.netns, *line], check=True)
            self.on(node.index, "install -d -o tandem /srv/trials")

    @property
    def first(self) -> Path:
        """The machines' share of the processors."""
        return CPU / self.lab.name

    def put_first(self) -> None:
        """Before this machine's other work, whatever that is: real machines share no
        processors. The control machine is this process and what it starts: behind four machines
        that decode it would not run for many seconds, and the run would end."""
        self.first.mkdir(exist_ok=True)
        (self.first / "cpu.shares").write_text("100000")
        self.admit(os.getpid())
        for pid, _ in commands():
            if f"/{self.lab.name}/" in read(pid, "cgroup"):
                self.admit(pid)

    def admit(self, pid: int) -> None:
        """A process among those of the machines; its children will be, too."""
        with contextlib.suppress(ProcessLookupError):
            (self.first / "cgroup.procs").write_text(str(pid))

    def on(self, node: int, line: str, **options) -> str:
        return self.lab.admin(node, f"sudo sh -c '{line}'", **options)

    def prepare(self, data: str) -> None:
        """Gives the machines a data set, once."""
        if data not in self.prepared:
            makers = {"disk": self.give_disks, "share": self.give_share}
            makers.get(data, lambda: self.give(data, "/srv/trials"))()
            self.prepared.add(data)

    def pictures(self, name: str, folder: Path) -> None:
        """A data set in a folder of this machine."""
        count, side = PICTURES[name]
        words = [name, str(count), str(side), str(int(name == "disk"))]
        subprocess.run([CHECKOUT / ".venv/bin/python", "-c", MAKE, *words], cwd=folder, check=True)

    def give(self, name: str, target: str) -> None:
        """A data set to all machines."""
        folder = self.scratch / "pictures"
        folder.mkdir(exist_ok=True)
        self.pictures(name, folder)
        packed = subprocess.run(["tar", "-cf", "-", name], cwd=folder, capture_output=True)
        for node in NODES:
            self.on(
                node, f"mkdir -p {target} && tar -xf - -C {target}", input=packed.stdout, text=False
            )

    def give_disks(self) -> None:
        """A disk of its own to each machine, with the pictures."""
        image = self.scratch / "disk.img"
        folder = self.scratch / "on-disk"
        folder.mkdir()
        self.pictures("disk", folder)
        make = ["mke2fs", "-q", "-t", "ext4", "-d", folder, image, "256m"]
        subprocess.run(make, check=True)
        shutil.rmtree(folder)
        for node in NODES:
            own = self.scratch / f"disk{node}.img"
            shutil.copy(image, own)
            made = ["losetup", "--find", "--show", "--direct-io=on", own]
            loop = subprocess.run(made, check=True, capture_output=True, text=True).stdout.strip()
            self.loops.append(loop)
            number = Path(loop).name.removeprefix("loop")
            self.on(node, f"mkdir -p /srv/trials/mnt; mknod {loop} b 7 {number} || true")
            self.on(node, f"mount -o ro {loop} /srv/trials/mnt; ln -sfn mnt/disk /srv/trials/disk")

    def give_share(self) -> None:
        """The stand-in for a share, and its pictures."""
        self.give("share", "/srv/share")
        library = self.scratch / "slow_share.so"
        make = ["gcc", "-shared", "-fPIC", "-O2", "-o", library, STANDINS / "slow_share.c", "-ldl"]
        subprocess.run(make, check=True)
        for node in NODES:
            self.on(node, "mkdir -p /srv/proc; : > /srv/share.count; chmod 666 /srv/share.count")
            self.on(node, "echo 0 > /srv/share.delay")
            data = library.read_bytes()
            self.on(node, "cat > /srv/slow_share.so", input=data, text=False)
            self.on(node, "cat /proc/self/mounts > /srv/proc/mounts")
            self.on(node, "echo nas:/images /srv/share nfs4 rw 0 0 >> /srv/proc/mounts")
            self.on(node, "echo /srv/slow_share.so > /etc/ld.so.preload")

    def close(self) -> None:
        for node in NODES:
            self.on(
                node, "rm -f /etc/ld.so.preload; umount -l /srv/trials/mnt || true", check=False
            )
        for loop in self.loops:
            subprocess.run(["losetup", "-d", loop], check=False)
        if self.first.exists():
            for pid in (self.first / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (CPU / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                self.first.rmdir()


class TrialRun(Running):
    """One run, in which trials follow one another."""

    def __init__(self, cluster: Cluster, folder: Path, mark: str, name: str):
        self.cluster, self.kind = cluster, name
        cluster.put_first()
        self.groups: list[Path] = []
        self.workers: dict[int, int] = {}
        data, batch, args = SETTINGS[name]
        folder.mkdir(parents=True)
        root = "/srv/share" if data == "share" else "/srv/trials"
        variable, _, value = mark.partition("=")
        env = {variable: value, "TRIAL_FAULTS": "/srv/trials/faults.json", "OMP_NUM_THREADS": "1"}
        settings = (
            f"ansible_user=tandem-admin train_user=tandem data_root={root} "
            f"env_python={cluster.python} run_env='{json.dumps(env)}'"
        )
        lines = [f"node{n} ansible_host=192.168.56.{110 + n} {settings}" for n in NODES]
        (folder / "trials.ini").write_text("\n".join(["[cluster]", *lines, ""]))
        words = ["--inventory", str(folder / "trials.ini"), "--nodes", "4", "--data", data]
        words += [
            "--model",
            f"{STANDINS / 'model.py'}:timed",
            "--batch",
            str(batch),
            "--epochs",
            "1",
        ]
        super().__init__(
            cluster.lab, folder, mark, *words, "--precision", "fp32", "--", *ARGS, *args
        )

    def steps(self) -> int:
        """That the first machine's rank has written."""
        home = self.cluster.nodes[0].disk / "upper/home/tandem/tandem/runs"
        return sum(
            path.read_text().count('"kind": "step"')
            for path in home.glob(f"{self.name}/nodes/node1/rank0.1.steps.jsonl")
        )

    def begin(self, seconds: float = 600) -> None:
        """Waits for its third step."""
        self.wait_for(r"tandem: run (\S+), attempt")
        until = time.monotonic() + seconds
        while self.steps() < 3:
            assert self.process.poll() is None and time.monotonic() < until, self.report()
            time.sleep(0.5)
        self.workers = {node: self.pids(node)["worker"] for node in NODES}

    def carry_out(self) -> Iterator[tuple[Trial, float, float, str]]:
        """Each trial, when its window began and ended, and what `make status` then said of the
        run."""
        for trial in trials(self.kind):
            with self.fault(trial):
                self.idle(time.monotonic() + SETTLE)
                begin = time.monotonic()
                self.idle(begin + WINDOWS.get(self.kind, WINDOW))
                end, status = time.monotonic(), self.status()
            assert self.process.poll() is None, self.report()[-3000:]
            yield trial, begin, end, status

    def status(self) -> str:
        """The wait that `make status` names."""
        progress = Follower(self.folder).look()
        return (progress and progress.cause) or "none"

    def idle(self, until: float) -> None:
        while time.monotonic() < until:
            time.sleep(max(0.0, min(0.5, until - time.monotonic())))
            if self.kind == "share":
                self.count_shares()

    def count_shares(self) -> None:
        """Writes the stand-in's mountstats by what was read."""
        for pid in self.workers.values():
            root = Path(f"/proc/{pid}/root/srv")
            read = sum(map(int, (root / "share.count").read_text().split()))
            text = "device nas:/images mounted on /srv/share with fstype nfs4 statvers=1.1\n"
            (root / "proc/new").write_text(f"{text}\tbytes:\t0 0 0 0 {read} 0 0 0\n")
            (root / "proc/new").replace(root / "proc/mountstats")

    @contextlib.contextmanager
    def fault(self, trial: Trial) -> Iterator[None]:
        """Within, there is that fault."""
        makers = {
            "nothing": lambda trial: contextlib.nullcontext(),
            "network of 1 Gbit/s": self.shaped,
            "network of 100 Mbit/s": self.shaped,
            "one slow link": self.slow_link,
            "a rank slower in backward": self.slower,
            "a CPU hog": self.hog,
            "a slow disk": self.throttled_reads,
            "a slow share": self.slow_share,
            "slow decoding": lambda trial: contextlib.nullcontext(),
            "checkpoint stalls": self.throttled_writes,
        }
        with makers[trial.fault](trial):
            yield

    @contextlib.contextmanager
    def shaped(self, trial: Trial) -> Iterator[None]:
        self.lab("shape", f"{trial.strength:.0f}mbit")
        yield
        self.lab("shape", "unshaped")

    @contextlib.contextmanager
    def slow_link(self, trial: Trial) -> Iterator[None]:
        self.lab("shape", "1000mbit")
        self.lab("shape", f"{trial.strength:.0f}mbit", str(trial.node))
        yield
        self.lab("shape", "unshaped")

    @contextlib.contextmanager
    def slower(self, trial: Trial) -> Iterator[None]:
        faults = json.dumps({name: USUAL[name] * trial.strength for name in ("backward", "burn")})
        path = "/srv/trials/faults.json"
        self.cluster.on(trial.node, f"cat > {path}.new && mv {path}.new {path}", input=faults)
        yield
        self.cluster.on(trial.node, f"rm {path}")

    @contextlib.contextmanager
    def hog(self, trial: Trial) -> Iterator[None]:
        """That machine's rank and so many programs on one processor, the other ranks elsewhere."""
        last = max(os.sched_getaffinity(0))
        ranks = self.workers
        for node, pid in ranks.items():
            mask = f"{last}" if node == trial.node else f"0-{last - 1}"
            subprocess.run(["taskset", "-acp", mask, str(pid)], check=True, capture_output=True)
        own = f"/proc/{ranks[trial.node]}/ns"
        busy = ["taskset", "-c", str(last), "sh", "-c", "while :; do :; done"]
        enter = ["nsenter", f"--pid={own}/pid", f"--mount={own}/mnt"]
        hogs = [subprocess.Popen([*enter, *busy]) for _ in range(int(trial.strength))]
        for process in hogs:
            self.cluster.admit(process.pid)
            for child in children(process.pid):
                self.cluster.admit(child)
        try:
            yield
        finally:
            for process in hogs:
                for pid in (*children(process.pid), process.pid):  # what nsenter began, then itself
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()
            for pid in ranks.values():
                free = ["taskset", "-acp", f"0-{last}", str(pid)]
                subprocess.run(free, check=False, capture_output=True)

    @contextlib.contextmanager
    def throttled(self, what: str, rate: float) -> Iterator[None]:
        """All machines' processes of this run together, on the disk that this checkout's files
        and the lab's are on."""
        state = Path("/var/lib/tandem-lab").stat().st_dev
        disk = f"{os.major(state)}:{os.minor(state)}"
        group = BLKIO / f"verdict-{os.getpid()}"
        group.mkdir(exist_ok=True)
        self.groups.append(group)
        for node in NODES:
            worker = self.workers[node]
            for pid in (worker, *children(worker)):
                (group / "cgroup.procs").write_text(str(pid))
        limit = group / f"blkio.throttle.{what}_bps_device"
        limit.write_text(f"{disk} {rate:.0f}")
        try:
            yield
        finally:
            limit.write_text(f"{disk} 0")

    def throttled_reads(self, trial: Trial):
        return self.throttled("read", 4 * 1000 * trial.strength)

    def throttled_writes(self, trial: Trial):
        return self.throttled("write", 4e6 * trial.strength)

    @contextlib.contextmanager
    def slow_share(self, trial: Trial) -> Iterator[None]:
        for node in NODES:
            self.cluster.on(node, f"echo {1000 * trial.strength:.0f} > /srv/share.delay")
        yield
        for node in NODES:
            self.cluster.on(node, "echo 0 > /srv/share.delay")

    def finish(self) -> None:
        """Ends it as `kill` does, and waits until its files have come. (What a shell started in the
        background hears no Ctrl-C.)"""
        os.kill(self.controller, signal.SIGTERM)
        self.end()

    def close(self) -> None:
        super().close()
        for group in self.groups:
            with contextlib.suppress(OSError):
                group.rmdir()


def children(pid: int) -> list[int]:
    return [
        int(one)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for one in path.read_text().split()
    ]


def part(run: Path, begin: float, end: float, target: Path) -> Path:
    """The folder of the steps of a run that ended between two moments, as a run of its own."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("checkpoints", "report.*"))
    for path in target.glob("nodes/*/rank*.steps.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        (start,) = [line for line in lines if line["kind"] == "start"]
        kept, clock, began = [], start["mono"], None
        for line in lines:
            before, clock = clock, clock + sum(line.get("seconds", {}).values())
            if line["kind"] in ("step", "checkpoint") and begin <= before and clock <= end:
                began = before if began is None else began
                kept.append(line)
        kept = [{**start, "mono": began}, *kept]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return target
