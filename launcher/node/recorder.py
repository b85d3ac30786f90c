"""Records what the machine does during an attempt, once a second (docs/run-directory.md)."""

import json
import os
import pathlib
import time

from launcher.node import counters
from launcher.node.disks import DiskRecorder
from launcher.node.gpus import Gpus
from launcher.node.processes import descendants
from launcher.node.sockets import Peers
from launcher.node.vitals import default_card, text_of


class JsonLines:
    """A file of JSON Lines in which a full disk leaves no broken line."""

    def __init__(self, path):
        self.path, self.fd = path, None

    def append(self, value):
        """Add one line, whole or not at all. Raises OSError."""
        if self.fd is None:
            self.fd = os.open(str(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        line = json.dumps(value).encode() + b"\n"
        size = os.fstat(self.fd).st_size
        try:
            complete = os.write(self.fd, line) == len(line)
        except OSError:
            os.ftruncate(self.fd, size)
            raise
        if not complete:
            os.ftruncate(self.fd, size)
            raise OSError("{}: no space for a whole line".format(self.path.name))


class NetworkRecorder:
    """net.jsonl"""

    def __init__(self, folder, attempt, interface):
        self.file, self.attempt = JsonLines(folder / "net.jsonl"), attempt
        self.interface, self.peers = interface, Peers()

    def start(self):
        """Write the first line. Without an interface from the task, take the default route's."""
        self.interface = self.interface or default_card()
        self.sample()

    def sample(self):
        """One line. Raises OSError."""
        dev, snmp = text_of("/proc/net/dev"), text_of("/proc/net/snmp")
        found = counters.network(dev, snmp, self.interface)
        if found is None:
            raise OSError("there is no network interface {}".format(self.interface))
        line = {"attempt": self.attempt, "mono": time.monotonic(), "interface": self.interface}
        line.update(found, speed_mbit=self.speed(), peers=self.sent_to())
        self.file.append(line)

    def sent_to(self):
        """What TCP sent to each peer; {} where the kernel does not tell."""
        try:
            return self.peers.look()
        except OSError:
            return {}

    def speed(self):
        """Mbit/s of the link; None where the card does not say (-1, or an error when down)."""
        text = text_of("/sys/class/net/{}/speed".format(self.interface)).strip()
        return int(text) if text.isdigit() else None

    def stop(self):
        """The last line."""
        self.sample()


class MountRecorder:
    """mounts.jsonl"""

    def __init__(self, folder, attempt):
        self.file, self.attempt = JsonLines(folder / "mounts.jsonl"), attempt

    def start(self):
        """The first line. (Shares may also be mounted later, on first use.)"""
        self.sample()

    def sample(self):
        """One line for each NFS and SMB mount. Raises OSError."""
        shares = counters.shares(text_of("/proc/self/mounts"))
        if not shares:
            return
        nfs = counters.nfs_read_bytes(text_of("/proc/self/mountstats"))
        cifs = counters.cifs_read_bytes(text_of("/proc/fs/cifs/Stats"))
        for point, (source, kind) in shares.items():
            read = cifs.get(counters.share_of(source)) if kind == "cifs" else nfs.get(point)
            if read is not None:
                line = {"attempt": self.attempt, "mono": time.monotonic(), "mount": point}
                self.file.append(dict(line, type=kind, read_bytes=read))

    def stop(self):
        """The last line."""
        self.sample()


class GpuRecorder:
    """gpu.jsonl, where nvidia-smi is."""

    def __init__(self, folder, attempt):
        self.file, self.attempt = JsonLines(folder / "gpu.jsonl"), attempt
        self.cards = Gpus()

    @property
    def process(self):
        return self.cards.process

    def start(self):
        self.cards.start()

    def sample(self):
        """Lines for what nvidia-smi has printed since. Raises OSError."""
        for found in self.cards.read():
            self.file.append(dict({"attempt": self.attempt}, **found))

    def stop(self):
        """The last lines; then nvidia-smi ends."""
        self.sample()
        self.cards.stop()


THINNED = 10000  # lines: after so many only every second sample is written, then every fourth, ...
LOOKED_FOR = 10  # samples between two searches for a rank's other processes
MOST_THREADS = 512  # of a rank that are read


class Schedule:
    """Seconds that the threads of a process and of its descendants `ran`, and `waited` for a
    processor, since they began. What a thread had that has ended stays in the sums."""

    def __init__(self, pid):
        self.pid, self.pids, self.looks = pid, [pid], 0
        self.ran = self.waited = 0.0
        self.threads = {}

    def look(self):
        """Add what has come since the last look."""
        if self.looks % LOOKED_FOR == 0:
            self.pids = [self.pid, *descendants(self.pid)]
        self.looks += 1
        now = {}
        for pid in self.pids:
            for thread in threads_of(pid)[: MOST_THREADS - len(now)]:
                text = text_of(str(thread / "schedstat"))
                if text:
                    now[thread] = counters.schedule(text)
        for thread, (ran, waited) in now.items():
            before = self.threads.get(thread, (0.0, 0.0))
            self.ran += max(0.0, ran - before[0])
            self.waited += max(0.0, waited - before[1])
        self.threads = now


def threads_of(pid):
    """The folders of a process's threads; none of one that has ended."""
    try:
        return list(pathlib.Path("/proc/{}/task".format(pid)).iterdir())
    except OSError:
        return []


class MachineRecorder:
    """machine.jsonl. `workers()` gives the pid of each rank that lives. `latest`: the newest line,
    for whoever sends it on."""

    def __init__(self, folder, attempt, workers):
        self.file, self.attempt, self.workers = (
            JsonLines(folder / "machine.jsonl"),
            attempt,
            workers,
        )
        self.latest, self.schedules = None, {}
        self.lines, self.seen, self.every = 0, 0, 1  # of how many samples one is written

    def start(self):
        """The first line."""
        self.sample()

    def sample(self):
        """One line; a run of months writes one in so many (THINNED). Raises OSError."""
        line = {"attempt": self.attempt, "mono": time.monotonic()}
        line.update(counters.processors(text_of("/proc/stat")))
        line.update(counters.memory(text_of("/proc/meminfo"), text_of("/proc/vmstat")))
        for what in ("cpu", "memory", "io"):
            line["pressure_" + what] = counters.pressure(text_of("/proc/pressure/" + what))
        line["ranks"] = self.ranks()
        self.latest = line
        if self.seen % self.every == 0:
            self.file.append(line)
            self.lines += 1
            if self.lines % THINNED == 0:
                self.every *= 2
        self.seen += 1

    def ranks(self):
        """The Schedule of each rank that lives, its loaders' processes included."""
        pids = self.workers()
        self.schedules = {rank: self.schedules.get(rank) or Schedule(pids[rank]) for rank in pids}
        found = {}
        for rank, schedule in self.schedules.items():
            schedule.look()
            ran, waited = round(schedule.ran, 3), round(schedule.waited, 3)
            found[str(rank)] = {"ran": ran, "waited": waited}
        return found

    def stop(self):
        """The last line."""
        self.every = 1
        self.sample()


class Recorder:
    """All recorders. A failure of one goes to `trouble(what, message)` and stops no other.
    `workers()` gives the pid of each rank that lives."""

    def __init__(self, task, folder, trouble, workers=dict):
        self.trouble = trouble
        self.gpus = GpuRecorder(folder, task.attempt)
        self.machine = MachineRecorder(folder, task.attempt, workers)
        self.parts = [
            ("disk recorder", DiskRecorder(folder, task.attempt, task.data)),
            ("network recorder", NetworkRecorder(folder, task.attempt, task.interface)),
            ("mount recorder", MountRecorder(folder, task.attempt)),
            ("GPU recorder", self.gpus),
            ("machine recorder", self.machine),
        ]

    def each(self, verb):
        """Call one method of every recorder."""
        for name, part in self.parts:
            try:
                getattr(part, verb)()
            except (OSError, ValueError, KeyError, IndexError) as error:
                self.trouble(name, "{}: {}".format(type(error).__name__, error))

    def start(self):
        """Begin recording."""
        self.each("start")

    def sample(self):
        """To be called once a second."""
        self.each("sample")

    def stop(self):
        """Complete all files."""
        self.each("stop")

    def pids(self):
        """Processes that belong to the recorders and not to the run."""
        processes = [getattr(part, "process", None) for _, part in self.parts]
        return [process.pid for process in processes if process is not None]
