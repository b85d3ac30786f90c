"""What a guard records of its machine: machine.<attempt>.jsonl, a line a second
(docs/run-directory.md). The same lines, printed, are what `make top` shows between runs.

Counters stand as the kernel has them, so that any two lines give what came between them; disks
alone in rates since the line before, as iostat -x prints them.
"""

import json
import os
import pathlib
import time

from contract import records
from launcher.node import counters
from launcher.node.machine import disk_free
from launcher.node.processes import decode_status, descendants, stat_of
from launcher.node.sockets import Peers

INTERVAL = 1.0  # seconds between two lines
LAST = 1 << 18  # bytes of all files after the last process has ended
BACKLOG_LIMIT = 1 << 16  # bytes that wait for the reader: then nothing is added
DECIMATE_AFTER = 20000  # lines: then every second sample is taken, then every fourth, ...
LOOKED_FOR = 10  # samples between two searches for a rank's other processes
MOST_THREADS = 512  # of a rank that are read
RANK_TIMES = ("ran", "waited", "loaders", "loaders_busy")  # seconds, of CpuTimes
# Sensors of processors, as their drivers call themselves in /sys/class/hwmon.
PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
READ_ERRORS = (OSError, ValueError, KeyError, IndexError)  # of a file of the kernel's


def text_of(path):
    """A file of the kernel's, or "" where there is none."""
    try:
        return pathlib.Path(path).read_text(errors="replace")
    except OSError:
        return ""


def default_network_interface():
    """The card of the default route, else the loopback."""
    routes = text_of("/proc/net/route"), text_of("/proc/net/ipv6_route")
    return counters.default_interface(*routes) or "lo"


def read_disks():
    """Counters of whole disks: a partition's are in its disk's already."""
    disks = counters.disks(text_of("/proc/diskstats"))
    block = pathlib.Path("/sys/block")
    return {name: value for name, value in disks.items() if (block / name).exists()}


def disk_of(path):
    """The disk, as iostat names it, that holds a path; None for shares, overlays and memory."""
    try:
        device = pathlib.Path(path).stat().st_dev
        place = pathlib.Path("/sys/dev/block/{}:{}".format(os.major(device), os.minor(device)))
        place = place.resolve(strict=True)
    except OSError:
        return None
    return place.parent.name if (place / "partition").exists() else place.name


class CpuTimes:
    """Seconds that the threads of a process and of its descendants `ran`, and `waited` for a
    processor, since they began. What a thread had that has ended stays in the sums.

    `loaders`: seconds that its descendants ran or wanted to; `loaders_busy`: the same, each counted
    by the part of the time in which it did. So their ratio is how busy those are that do something,
    whatever sleeps beside them, as loaders of another part of the data and wandb's processes."""

    def __init__(self, pid):
        self.pid, self.pids, self.looks = pid, [pid], 0
        self.ran = self.waited = self.loaders = self.loaders_busy = 0.0
        self.threads, self.looked = {}, time.monotonic()

    def state(self):
        """How the kernel says its processes are: T where one is stopped, else D where one waits for
        a disk or a file server, else that of the first; "" where it is gone."""
        stats = map(stat_of, self.pids)
        states = [stat.state if stat is not None else "" for stat in stats]
        return next((bad for bad in "TD" if bad in states), states[0])

    def look(self):
        """Add what has come since the last look."""
        if self.looks % LOOKED_FOR == 0:
            self.pids = [self.pid, *descendants(self.pid)]
        self.looks += 1
        now, last, self.looked = {}, self.looked, time.monotonic()
        passed = self.looked - last
        for pid in self.pids:
            busy = 0.0
            for thread in threads_of(pid)[: MOST_THREADS - len(now)]:
                text = text_of(str(thread / "schedstat"))
                if text:
                    now[thread] = counters.schedule(text)
                    busy += self.add(self.threads.get(thread, (0.0, 0.0)), now[thread])
            if pid != self.pid and passed > 0:
                busy = min(busy, passed)
                self.loaders += busy
                self.loaders_busy += busy * busy / passed
        self.threads = now

    def add(self, before, now):
        """What a thread had since the last look. Its sum."""
        ran, waited = (max(0.0, later - earlier) for earlier, later in zip(before, now))
        self.ran += ran
        self.waited += waited
        return ran + waited


def threads_of(pid):
    """The folders of a process's threads; none of one that has ended."""
    try:
        return list(pathlib.Path("/proc/{}/task".format(pid)).iterdir())
    except OSError:
        return []


class Sampler:
    """How this machine is now. What cannot be read is left out, and goes to `trouble(what, why)`.
    `pids()` gives the process of each rank that lives; `folder`: where the run's files lie."""

    def __init__(self, interface="", data="", folder=None, pids=dict, trouble=None):
        self.interface = interface or default_network_interface()
        self.data_disk = disk_of(data) if data else None
        self.folder, self.pids = folder, pids
        self.trouble = trouble or (lambda what, why: None)
        self.gpus, self.peers, self.schedules = counters.Gpus(), Peers(), {}
        self.gpu_used = 0.0  # when one was seen at work last
        self.signs = {}  # that the ranks train apart, as fields of a line
        self.finished = []  # ranks that ended with exit code 0
        self.disks = (time.monotonic(), read_disks())
        self.parts = {
            "processors": self.processors,
            "memory": self.memory,
            "temperature": self.temperature,
            "room": self.free_disk_bytes,
            "ranks": self.ranks,
            "network card": self.interface_counters,
            "disks": self.disk_rates,
            "mounts": self.mounts,
            "GPUs": self.gpu_samples,
        }

    def sample(self):
        """One line."""
        line = {"kind": "sample", "mono": time.monotonic(), "unix": round(time.time(), 3)}
        for name, part in self.parts.items():
            try:
                line.update(part())
            except READ_ERRORS as error:
                self.trouble(name, "{}: {}".format(type(error).__name__, error))
        return line

    def processors(self):
        return counters.processors(text_of("/proc/stat"))

    def memory(self):
        found = counters.memory(text_of("/proc/meminfo"), text_of("/proc/vmstat"))
        for what in ("cpu", "memory", "io"):
            pressure = counters.pressure(text_of("/proc/pressure/" + what))
            if pressure is not None:
                found["pressure_" + what] = pressure
        return found

    def temperature(self):
        """The hottest processor in degrees Celsius, where a sensor tells."""
        degrees = []
        for folder in pathlib.Path("/sys/class/hwmon").glob("hwmon*"):
            if text_of(folder / "name").strip() in PROCESSORS:
                texts = [text_of(path).strip() for path in folder.glob("temp*_input")]
                degrees += [int(text) / 1000 for text in texts if text.isdigit()]
        return {"temperature": max(degrees)} if degrees else {}

    def free_disk_bytes(self):
        free = disk_free(self.folder) if self.folder is not None else None
        return {} if free is None else {"disk_free": free}

    def ranks(self):
        """How each rank that lives is, and what its threads had of the processors; its loaders'
        included."""
        pids = self.pids()
        self.schedules = {rank: self.schedules.get(rank) or CpuTimes(pids[rank]) for rank in pids}
        ranks = {}
        for rank, schedule in self.schedules.items():
            schedule.look()
            times = {name: round(getattr(schedule, name), 3) for name in RANK_TIMES}
            ranks[str(rank)] = dict(times, state=schedule.state())
        finished = {"finished": self.finished} if self.finished else {}
        return dict(self.signs, ranks=ranks, **finished) if ranks else finished

    def interface_counters(self):
        dev, snmp = text_of("/proc/net/dev"), text_of("/proc/net/snmp")
        card = counters.network(dev, snmp, self.interface)
        if card is None:
            raise OSError("there is no network interface {}".format(self.interface))
        speed = text_of("/sys/class/net/{}/speed".format(self.interface)).strip()
        card.update(interface=self.interface)
        if speed.isdigit():  # -1, or nothing, where the card does not say
            card["speed_mbit"] = int(speed)
        try:
            peers = self.peers.look()
        except OSError:  # the kernel does not tell what was sent to whom
            peers = {}
        if peers:
            card["peers"] = peers
        return {"card": card}

    def disk_rates(self):
        """Of the disks that did something since the last line, and of the one with the data."""
        (then, old), now = self.disks, (time.monotonic(), read_disks())
        self.disks, passed = now, max(1e-3, now[0] - then)
        rates = {}
        for name, counted in now[1].items():
            if name in old and (name == self.data_disk or counted != old[name]):
                rates[name] = counters.disk_rates(old[name], counted, passed)
        known = {} if self.data_disk is None else {"data_disk": self.data_disk}
        return dict(known, disks=rates)

    def mounts(self):
        """Bytes read from each NFS and SMB mount."""
        shares = counters.shares(text_of("/proc/self/mounts"))
        if not shares:
            return {}
        nfs = counters.nfs_read_bytes(text_of("/proc/self/mountstats"))
        cifs = counters.cifs_read_bytes(text_of("/proc/fs/cifs/Stats"))
        mounts = {}
        for point, (source, kind) in shares.items():
            read = cifs.get(counters.share_of(source)) if kind == "cifs" else nfs.get(point)
            if read is not None:
                mounts[point] = {"type": kind, "read_bytes": read}
        return {"mounts": mounts}

    def gpu_samples(self):
        """The last that nvidia-smi printed of each GPU since the line before."""
        seen = {}
        for card in self.gpus.read():
            seen[card["index"]] = card
            # nvidia-smi does not know it of a part of a GPU, which counts as used.
            self.gpu_used = card["mono"] if card["utilization"] != 0 else self.gpu_used
        return {"gpus": [seen[index] for index in sorted(seen)]} if seen else {}


class Lines:
    """A file of JSON Lines in which a full disk leaves no broken line."""

    def __init__(self, path):
        self.path, self.fd = path, None

    def append(self, value):
        """Add one line, whole or not at all. Raises OSError."""
        if self.fd is None:
            self.fd = os.open(str(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        size = os.fstat(self.fd).st_size
        try:
            complete = os.write(self.fd, line) == len(line)
        except OSError:
            os.ftruncate(self.fd, size)
            raise
        if not complete:
            os.ftruncate(self.fd, size)
            raise OSError("{}: no space for a whole line".format(self.path.name))


class Recorder:
    """The file of one attempt: `sample` lines, then `exit`. What fails goes to
    `trouble(what, why)` and ends nothing."""

    def __init__(self, task, folder, trouble, pids=dict):
        self.task, self.trouble = task, trouble
        self.file = Lines(folder / records.machine(task.attempt))
        self.sampler = Sampler(task.interface, task.data, folder, pids, trouble)
        self.lines, self.ticks, self.every = 0, 0, 1  # of how many ticks one is a line

    def write(self, line):
        try:
            self.file.append(line)
        except OSError as error:
            self.trouble("records", "{}: {}".format(type(error).__name__, error))

    def begin(self):
        try:
            self.sampler.gpus.start()
        except OSError as error:
            self.trouble("nvidia-smi", str(error))
        self.write(self.sampler.sample())

    def tick(self):
        """To be called every INTERVAL; a run of weeks has a line in so many (DECIMATE_AFTER)."""
        self.ticks += 1
        if self.ticks % self.every == 0:
            self.write(self.sampler.sample())
            self.lines += 1
            if self.lines % DECIMATE_AFTER == 0:
                self.every *= 2

    def end(self, entry, peaks):
        """The last lines: a sample, and how this node's part ended; `peaks` is the memory that
        each worker had at most."""
        self.write(self.sampler.sample())
        self.sampler.gpus.stop()
        signs = self.sampler.signs
        self.write(dict({"kind": "exit"}, **entry, peak_memory_bytes=peaks, **signs))

    def helper_pids(self):
        """Processes that belong to the recorder and not to the run."""
        nvidia_smi = self.sampler.gpus.process
        return [nvidia_smi.process.pid] if nvidia_smi is not None else []


def exit_entry(mono_start, launch_status, workers):
    """How a node's part of an attempt ended, for the record and the exit frame; launch_status or
    None."""
    code, name = decode_status(launch_status) if launch_status is not None else (None, None)
    return {
        "mono_start": mono_start,
        "mono_end": time.monotonic(),
        "exit_code": code,
        "signal": name,
        "workers": {str(worker.rank): worker.outcome() for worker in workers},
    }


NAMED = 400  # processes listed with their command: a frame has 1 MiB at most


def leftovers(ended, left):
    """The processes that were ended (commands by pid), and those that could not be."""

    def listed(pids):
        commands = [ended[pid] if place < NAMED else "" for place, pid in enumerate(sorted(pids))]
        return [{"pid": pid, "command": command} for pid, command in zip(sorted(pids), commands)]

    return {"ended": listed(ended), "left": listed(left)}


def stream():
    """Print this machine's lines until nobody reads them."""
    sampler = Sampler()
    sampler.gpus.start()
    try:
        while True:
            time.sleep(INTERVAL)
            print(json.dumps(sampler.sample(), separators=(",", ":")), flush=True)
    except OSError:
        sampler.gpus.stop()


class Tail:
    """Sends what grows in the record files of an attempt, so that the control machine's copies grow
    with them: a little a second, and nothing that anybody waits for. What is missing at the end is
    fetched from where the copy ends (launcher/collect.py)."""

    def __init__(self, folder, task):
        self.folder = folder
        self.sent = dict.fromkeys(records.names(task.attempt, task.ranks), 0)  # bytes
        self.stepped = {}  # file: when a step, or another end of something, came into it last

    def send(self, frames):
        """The next piece of each file, unless the reader is behind. Returns the bytes of all."""
        total = 0
        for name, offset in self.sent.items():
            if frames.size > BACKLOG_LIMIT:
                break
            piece = self.read(name, offset)
            if piece:
                frames.send("record", piece, file=name, offset=offset)
                self.sent[name] += len(piece)
                if any(b'"stall"' not in line for line in piece.splitlines()):
                    self.stepped[name] = time.monotonic()
                total += len(piece)
        return total

    def rest(self, frames):
        """What is left, as far as it goes quickly."""
        total = 0
        while total < LAST:
            sent = self.send(frames)
            if not sent:
                return
            total += sent

    def read(self, name, offset):
        """Whole lines from there on; b"" where there are none."""
        try:
            # What is no file there must not hold up the guard.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            descriptor = os.open(str(self.folder / name), flags)
        except OSError:  # not there yet, or the disk fails, which its rank says
            return b""
        try:
            piece = os.pread(descriptor, records.PIECE, offset)
        except OSError:
            return b""
        finally:
            os.close(descriptor)
        end = piece.rfind(b"\n") + 1
        return piece[:end] if end or len(piece) < records.PIECE else piece
