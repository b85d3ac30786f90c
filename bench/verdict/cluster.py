"""Run four machines of a lab with the images of the trials. Their processes are also processes of
this machine, which writes their files below the root of their first process (/proc/PID/root)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.verdict.trials import BATCH, DISK, FILES, NODES, SLOW_FILES
from lab.plan import CACHE, RELEASES, Node
from tests.lab.chaos_run import commands, read
from tests.lab.conftest import RunningLab

HERE = Path(__file__).parent
RATE = "1gbit"  # of all links without a fault
IMAGES, FILE_BYTES = 4_000, 1 << 17  # tiny pictures, in files as large as photographs
# A line of /proc/mounts. The machines read it from /srv/proc, so that they seem to have a share.
SHARE = "nas:/images /srv/share nfs4 rw 0 0\n"


def run(*words: object, **options) -> str:
    """Run a command that has to succeed. Return its standard output."""
    options = {"check": True, "capture_output": True, "text": True, **options}
    return subprocess.run([str(word) for word in words], **options).stdout


def make_images(folder: Path, linked: bool) -> None:
    """Write a data set. `linked`: its images are links to one file, so only the first is read."""
    from PIL import Image

    picture = folder / "picture.jpg"
    Image.linear_gradient("L").resize((8, 8)).convert("RGB").save(picture)
    data = picture.read_bytes()
    # Disks may store a file of zeros without reading or writing it.
    picture.write_bytes(data + os.urandom(FILE_BYTES - len(data)))
    for split, count in (("train", IMAGES), ("val", 2 * BATCH)):
        for number in range(count):
            file = folder / f"tiny/{split}/{number % 2}/{number:05}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            (os.link if linked else shutil.copy)(picture, file)


class Cluster:
    """`python`: of the machines' environment; `roots`: {machine: its root directory}; `loops`: the
    devices of their disks."""

    def __init__(self) -> None:
        self.lab = RunningLab(f"verdict-{os.getpid()}")
        self.nodes = [Node(self.lab.name, number) for number in NODES]
        self.loops: list[str] = []
        self.scratch = Path(tempfile.mkdtemp(prefix="verdict-"))

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self) -> None:
        # An earlier lab may have provisioned the environment.
        ready = any((CACHE / "envs" / RELEASES[0]).glob("cpu-*/bin/python"))
        self.lab("up", "--nodes", str(len(NODES)), "--rate", RATE, *["--no-bundle"] * ready)
        if not ready:
            # The trials bring their own images, so the checkout needs no data sets.
            self.lab.control("ansible-playbook", "site.yml", "-e", '{"data_sets": []}')
        self.python = self.lab.ssh(1, "ls -dt /opt/tandem/envs/cpu-*/bin/python | head -1").strip()
        self.roots = {node.index: self.first_process(node) for node in self.nodes}
        library = self.scratch / "slow_files.so"
        run("gcc", "-shared", "-fPIC", "-O2", "-o", library, HERE / "slow_files.c", "-ldl")
        make_images(self.scratch, linked=True)
        packed = self.scratch / "tiny.tar"
        run("tar", "-cf", packed, "-C", self.scratch, "tiny")
        for node in self.nodes:
            # BBR, where it is the default, keeps the rate from before a link was shaped.
            self.run_in_network(node.index, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
            for folder in (FILES, SLOW_FILES, f"{DISK}/tiny", "/srv/proc"):
                self.path(node.index, folder).mkdir(parents=True, exist_ok=True)
            for folder in (FILES, SLOW_FILES):
                run("tar", "-xf", packed, "-C", self.path(node.index, folder))
            shutil.copy(library, self.path(node.index, "/srv/slow_files.so"))
            self.write(node.index, "/etc/ld.so.preload", "/srv/slow_files.so\n")

    def first_process(self, node: Node) -> Path:
        """Return a machine's root directory, as this machine sees it."""
        group = f"/{self.lab.name}/{node.name}"
        pids = [pid for pid, _ in commands() if group in read(pid, "cgroup")]
        (pid,) = [pid for pid in pids if read(pid, "comm") == "systemd\n" and is_first(pid)]
        return Path(f"/proc/{pid}/root")

    def path(self, node: int, path: str) -> Path:
        return self.roots[node] / path.lstrip("/")

    def write(self, node: int, path: str, text: str) -> None:
        """Replace a file of a machine at once. An empty text removes the file."""
        file = self.path(node, path)
        if text:
            new = file.with_name(f"{file.name}.new")
            new.write_text(text)
            new.chmod(0o666)
            new.replace(file)
        else:
            file.unlink(missing_ok=True)

    def run_in_network(self, node: int, *words: object) -> str:
        """Run a command of this machine in the network namespace of a machine."""
        return run("ip", "netns", "exec", self.nodes[node - 1].netns, *words)

    def run_among_files(self, node: int, line: str) -> str:
        """Run a command line that sees the files of a machine."""
        pid = self.roots[node].parent.name
        return run("nsenter", "--target", pid, "--mount", "sh", "-c", line)

    def make_disks(self) -> None:
        """Give each machine a disk of its own. All are one file, which is read without caches."""
        image, folder = self.scratch / "disk.img", self.scratch / "on-disk"
        folder.mkdir()
        make_images(folder, linked=False)
        run("mke2fs", "-q", "-t", "ext4", "-d", folder, image, "700m")
        shutil.rmtree(folder)
        for node in NODES:
            words = ("--find", "--show", "--read-only", "--direct-io=on", image)
            self.loops.append(run("losetup", *words).strip())
            number = self.loops[-1].removeprefix("/dev/loop")
            self.run_among_files(node, f"mknod {self.loops[-1]} b 7 {number} 2>/dev/null || true")

    def prepare(self, root: str, is_share: bool, usual: Mapping[str, float]) -> None:
        """Remove the traces of the run before. `root`: where the images are; `is_share`: they seem
        to be on a share; `usual`: the content of /srv/trial.json."""
        if root == DISK and not self.loops:
            self.make_disks()
        for node in NODES:
            self.write(node, "/srv/trial.json", json.dumps(usual) if usual else "")
            self.write(node, "/srv/share.delay", "0\n")
            self.write(node, "/srv/share.count", "0\n")
            mounts = (self.roots[node].parent / "mounts").read_text() + SHARE if is_share else ""
            self.write(node, "/srv/proc/mounts", mounts)
            self.write(node, "/srv/proc/mountstats", "")
            if root == DISK:
                loop = self.loops[node - 1]
                self.run_among_files(node, f"umount {DISK} 2>/dev/null; mount -o ro {loop} {DISK}")

    def count_shares(self) -> None:
        """Update the statistics of the machines' shares by the bytes that were read."""
        for node in NODES:
            if self.path(node, "/srv/proc/mounts").exists():
                read = sum(map(int, self.path(node, "/srv/share.count").read_text().split()))
                text = "device nas:/images mounted on /srv/share with fstype nfs4 statvers=1.1\n"
                text += f"\tbytes:\t0 0 0 0 {read} 0 0 0\n"
                self.write(node, "/srv/proc/mountstats", text)

    def inventory(self, root: str, mark: str) -> Path:
        name, _, value = mark.partition("=")
        env = json.dumps({name: value, "OMP_NUM_THREADS": "1"})
        settings = (
            f"ansible_user=tandem-admin train_user=tandem data_root={root} "
            f"env_python={self.python} run_env='{env}'"
        )
        file = self.scratch / "trials.ini"
        lines = [f"{node.name} ansible_host={node.address} {settings}" for node in self.nodes]
        file.write_text("\n".join(["[cluster]", *lines, ""]))
        return file

    def shape(self, rate: str, node: int | None = None) -> None:
        self.lab("shape", rate, *([str(node)] if node else []))

    def __exit__(self, *_: object) -> None:
        for node in getattr(self, "roots", {}):
            self.run_among_files(node, f"umount -l {DISK} 2>/dev/null || true")
        for loop in self.loops:
            run("losetup", "-d", loop, check=False)
        self.lab("down", check=False)
        shutil.rmtree(self.scratch)


def is_first(pid: int) -> bool:
    """Return whether a process is the first of its machine, which has ID 1 there."""
    lines = read(pid, "status").splitlines()
    return any(line.split() == ["NSpid:", str(pid), "1"] for line in lines)


def busy_cores(seconds: float) -> float:
    """Return the share of this machine's processors that is busy during these seconds."""
    before = processor_seconds()
    time.sleep(seconds)
    return busy_since(before)


def processor_seconds() -> tuple[float, float]:
    """Return (idle seconds, all seconds) of this machine's processors since it was started."""
    numbers = [float(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return numbers[3] + numbers[4], sum(numbers)


def busy_since(before: Iterable[float]) -> float:
    """Return the share of the processors that was busy. `before`: of processor_seconds."""
    idle, total = (now - then for now, then in zip(processor_seconds(), before))
    return 1 - idle / total if total else 0.0
