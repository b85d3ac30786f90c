"""Records a machine during an attempt: machine.<attempt>.jsonl, a line a second
(docs/run-directory.md). `make top` prints the same lines between runs.

A line has the kernel's counters, so that the difference of any two lines gives what happened
between them. Only disks have rates, since the line before, as iostat -x prints them.
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
END_BYTES = 1 << 18  # of all files, sent after the last process has ended
BACKLOG_LIMIT = 1 << 16  # bytes that wait for the reader: then nothing is added
DECIMATE_AFTER = 20000  # lines: then every second sample is taken, then every fourth, ...
SEARCH_EVERY = 10  # samples between two searches for a rank's other processes
MOST_THREADS = 512  # of a rank that are read
RANK_TIMES = ("ran", "waited", "loaders", "loaders_busy")  # seconds, of CpuTimes
# Sensors of processors, as their drivers call themselves in /sys/class/hwmon.
PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
# Errors while a kernel's file is read and parsed: its format may differ on another kernel.
READ_ERRORS = (OSError, ValueError, KeyError, IndexError)


def read_text(path):
    """Read a file of the kernel's; return "" if there is none."""
    try:
        return pathlib.Path(path).read_text(errors="replace")
    except OSError:
        return ""


def read_disks():
    """Return {disk: counters} of whole disks: they include their partitions' counters."""
    disks = counters.disks(read_text("/proc/diskstats"))
    block = pathlib.Path("/sys/block")
    return {name: value for name, value in disks.items() if (block / name).exists()}


def disk_of(path):
    """Return iostat's name of the disk with this path; None for shares, overlays and memory."""
    try:
        device = pathlib.Path(path).stat().st_dev
        place = pathlib.Path("/sys/dev/block/{}:{}".format(os.major(device), os.minor(device)))
        place = place.resolve(strict=True)
    except OSError:
        return None
    return place.parent.name if (place / "partition").exists() else place.name


class CpuTimes:
    """Sums the seconds that the threads of a process and of its descendants `ran`, and `waited` for
    a processor, since they began. The times of threads that have ended stay in the sums.

    `loaders`: seconds that its descendants ran or waited; `loaders_busy`: the same, each second
    weighted by the fraction of the time in which its process was busy. Their ratio is how busy the
    active loaders are: processes that sleep (other loaders, wandb) do not lower it.
    """

    def __init__(self, pid):
        self.pid, self.pids, self.look_count = pid, [pid], 0
        self.ran = self.waited = self.loaders = self.loaders_busy = 0.0
        self.threads, self.look_time = {}, time.monotonic()
        self.is_known = False  # a thread's times were read

    def state(self):
        """Return a letter as ps writes it: T if a process is stopped, else D if one waits for a
        disk or a file server, else the first one's state; "" if it is gone."""
        stats = map(stat_of, self.pids)
        states = [stat.state if stat is not None else "" for stat in stats]
        return next((stuck for stuck in "TD" if stuck in states), states[0])

    def look(self):
        """Add the seconds since the last look."""
        # A search reads all of /proc, so new loaders are found a few seconds late.
        if self.look_count % SEARCH_EVERY == 0:
            self.pids = [self.pid, *descendants(self.pid)]
        self.look_count += 1
        threads, before, self.look_time = {}, self.look_time, time.monotonic()
        passed = self.look_time - before
        for pid in self.pids:
            busy = 0.0
            for folder in list_threads(pid)[: MOST_THREADS - len(threads)]:
                text = read_text(str(folder / "schedstat"))
                if text:
                    self.is_known = True
                    threads[folder] = ran, waited = counters.schedule(text)
                    ran_before, waited_before = self.threads.get(folder, (0.0, 0.0))
                    # Below 0 if another thread has the number of one that ended.
                    ran, waited = max(0.0, ran - ran_before), max(0.0, waited - waited_before)
                    self.ran += ran
                    self.waited += waited
                    busy += ran + waited
            if pid != self.pid and passed > 0:
                busy = min(busy, passed)
                self.loaders += busy
                self.loaders_busy += busy * busy / passed
        self.threads = threads


def list_threads(pid):
    """Return the folders in /proc of a process's threads; [] if it has ended."""
    try:
        return list(pathlib.Path("/proc/{}/task".format(pid)).iterdir())
    except OSError:
        return []


class Sampler:
    """Samples the state of this machine. A sample lacks what cannot be read, which goes to
    `trouble(subject, cause)`. `pids()` returns {rank: pid} of the ranks that live; `folder` is
    where the run's files are."""

    def __init__(self, interface="", data="", folder=None, pids=dict, trouble=None):
        if not interface:
            routes = read_text("/proc/net/route"), read_text("/proc/net/ipv6_route")
            interface = counters.default_interface(*routes) or "lo"
        self.interface = interface
        self.data_disk = disk_of(data) if data else None
        self.folder, self.pids = folder, pids
        self.trouble = trouble or (lambda subject, cause: None)
        self.gpus, self.peers, self.schedules = counters.Gpus(), Peers(), {}
        self.gpu_busy_time = 0.0  # when a GPU was last seen busy, by the monotonic clock
        self.signs = {}  # that the ranks train apart, as fields of a line
        self.finished = []  # ranks that ended with exit code 0
        self.disks = (time.monotonic(), read_disks())
        # The keys go to `trouble`, which reports each once.
        self.readers = {
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
        """Return one line, as a dictionary."""
        line = {"kind": "sample", "mono": time.monotonic(), "unix": round(time.time(), 3)}
        # A figure that cannot be read must not cost the others.
        for name, read in self.readers.items():
            try:
                line.update(read())
            except READ_ERRORS as error:
                self.trouble(name, "{}: {}".format(type(error).__name__, error))
        return line

    def processors(self):
        return counters.processors(read_text("/proc/stat"))

    def memory(self):
        figures = counters.memory(read_text("/proc/meminfo"), read_text("/proc/vmstat"))
        for resource in ("cpu", "memory", "io"):
            pressure = counters.pressure(read_text("/proc/pressure/" + resource))
            if pressure is not None:
                figures["pressure_" + resource] = pressure
        return figures

    def temperature(self):
        """Return the hottest processor's temperature in degrees Celsius, if a sensor has it."""
        degrees = []
        # A PC has sensors of its board and disks, too, which say nothing about the processor.
        for folder in pathlib.Path("/sys/class/hwmon").glob("hwmon*"):
            if read_text(folder / "name").strip() in PROCESSORS:
                texts = [read_text(path).strip() for path in folder.glob("temp*_input")]
                degrees += [int(text) / 1000 for text in texts if text.isdigit()]
        return {"temperature": max(degrees)} if degrees else {}

    def free_disk_bytes(self):
        free_bytes = disk_free(self.folder) if self.folder is not None else None
        return {} if free_bytes is None else {"disk_free": free_bytes}

    def ranks(self):
        """Return the state and CpuTimes of each rank that lives, its loaders included."""
        pids = self.pids()
        self.schedules = {rank: self.schedules.get(rank) or CpuTimes(pids[rank]) for rank in pids}
        ranks = {}
        for rank, schedule in self.schedules.items():
            schedule.look()
            ranks[str(rank)] = {"state": schedule.state()}
            # Without /proc/<pid>/task/*/schedstat these times are unknown, not 0. A rank that
            # has just ended keeps the times read before.
            if schedule.is_known:
                times = {name: round(getattr(schedule, name), 3) for name in RANK_TIMES}
                ranks[str(rank)].update(times)
        finished = {"finished": self.finished} if self.finished else {}
        return dict(self.signs, ranks=ranks, **finished) if ranks else finished

    def interface_counters(self):
        dev, snmp = read_text("/proc/net/dev"), read_text("/proc/net/snmp")
        figures = counters.network(dev, snmp, self.interface)
        if figures is None:
            raise OSError("there is no network interface {}".format(self.interface))
        speed = read_text("/sys/class/net/{}/speed".format(self.interface)).strip()
        figures.update(interface=self.interface)
        if speed.isdigit():  # -1, or nothing, if the driver does not say
            figures["speed_mbit"] = int(speed)
        try:
            peers = self.peers.look()
        except OSError:  # this kernel does not say what was sent to whom
            peers = {}
        if peers:
            figures["peers"] = peers
        return {"card": figures}

    def disk_rates(self):
        """Return the rates of the disks that did something since the last line, and of the disk
        with the data."""
        # A PC may have dozens of block devices (snap's), so idle ones are not recorded.
        (time_before, counters_before), self.disks = self.disks, (time.monotonic(), read_disks())
        passed = max(1e-3, self.disks[0] - time_before)
        rates = {}
        for name, figures in self.disks[1].items():
            before = counters_before.get(name)
            if before is not None and (name == self.data_disk or figures != before):
                rates[name] = counters.disk_rates(before, figures, passed)
        line = {} if self.data_disk is None else {"data_disk": self.data_disk}
        if self.disks[1]:  # without /proc/diskstats it is unknown whether a disk was busy
            line["disks"] = rates
        return line

    def mounts(self):
        """Return the bytes read from each NFS and SMB mount."""
        shares = counters.shares(read_text("/proc/self/mounts"))
        if not shares:
            return {}
        nfs = counters.nfs_read_bytes(read_text("/proc/self/mountstats"))
        cifs = counters.cifs_read_bytes(read_text("/proc/fs/cifs/Stats"))
        mounts = {}
        for point, (source, kind) in shares.items():
            share = counters.share_name(source)
            read_bytes = cifs.get(share) if kind == "cifs" else nfs.get(point)
            if read_bytes is not None:
                mounts[point] = {"type": kind, "read_bytes": read_bytes}
        return {"mounts": mounts}

    def gpu_samples(self):
        """Return the last sample of each GPU since the line before."""
        samples = {}
        for sample in self.gpus.read():
            samples[sample["index"]] = sample
            # nvidia-smi has no utilization of a slice of a GPU (MIG): the slice counts as busy.
            if sample["utilization"] != 0:
                self.gpu_busy_time = sample["mono"]
        return {"gpus": [samples[index] for index in sorted(samples)]} if samples else {}


class Lines:
    """Appends to a file of JSON Lines; a full disk leaves no broken line there."""

    def __init__(self, path):
        self.path, self.fd = path, None

    def append(self, value):
        """Add one line, whole or not at all. Raises OSError."""
        if self.fd is None:
            self.fd = os.open(str(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        # A full disk may take a part of a line: what it took is cut off again.
        size = os.fstat(self.fd).st_size
        try:
            is_complete = os.write(self.fd, line) == len(line)
        except OSError:
            os.ftruncate(self.fd, size)
            raise
        if not is_complete:
            os.ftruncate(self.fd, size)
            raise OSError("{}: no space for a whole line".format(self.path.name))


class Recorder:
    """Writes the file of one attempt: `sample` lines, then `exit`. A failure goes to
    `trouble(subject, cause)` and ends nothing."""

    def __init__(self, task, folder, trouble, pids=dict):
        self.task, self.trouble = task, trouble
        self.file = Lines(folder / records.machine(task.attempt))
        self.sampler = Sampler(task.interface, task.data, folder, pids, trouble)
        self.line_count, self.tick_count = 0, 0
        self.ticks_per_line = 1

    def write(self, line):
        """Add a line to the file; a full disk is reported."""
        try:
            self.file.append(line)
        except OSError as error:
            self.trouble("records", "{}: {}".format(type(error).__name__, error))

    def begin(self):
        """Start nvidia-smi and write the first sample."""
        try:
            self.sampler.gpus.start()
        except OSError as error:
            self.trouble("nvidia-smi", str(error))
        self.write(self.sampler.sample())

    def tick(self):
        """Write a sample if it is due. To be called every INTERVAL."""
        self.tick_count += 1
        if self.tick_count % self.ticks_per_line == 0:
            self.write(self.sampler.sample())
            self.line_count += 1
            # The file of a run of weeks stays small: its lines become rarer.
            if self.line_count % DECIMATE_AFTER == 0:
                self.ticks_per_line *= 2

    def end(self, entry, peaks):
        """Write the last sample and the exit line: `entry`, and {rank: largest memory in bytes}."""
        self.write(self.sampler.sample())
        self.sampler.gpus.stop()
        signs = self.sampler.signs
        self.write(dict({"kind": "exit"}, **entry, peak_memory_bytes=peaks, **signs))

    def helper_pids(self):
        """Return the pids of processes that belong to the recorder and not to the run."""
        nvidia_smi = self.sampler.gpus.process
        return [nvidia_smi.process.pid] if nvidia_smi is not None else []


def exit_entry(mono_start, launch_status, workers):
    """Return how an attempt ended on this node, for the record and the exit frame. `launch_status`
    is launch's wait status, or None if it did not start."""
    code, name = decode_status(launch_status) if launch_status is not None else (None, None)
    return {
        "mono_start": mono_start,
        "mono_end": time.monotonic(),
        "exit_code": code,
        "signal": name,
        "workers": {str(worker.rank): worker.outcome() for worker in workers},
    }


LISTED_COMMANDS = 400  # processes listed with their command: a frame has 1 MiB at most


def leftovers(commands, hanging):
    """Return the exit frame's lists of the processes that were ended (`commands` by pid), and of
    the pids `hanging` among them that could not be ended."""

    def list_processes(pids):
        return [
            {"pid": pid, "command": commands[pid] if place < LISTED_COMMANDS else ""}
            for place, pid in enumerate(sorted(pids))
        ]

    return {"ended": list_processes(commands), "left": list_processes(hanging)}


def stream():
    """Print this machine's lines until their reader closes the pipe."""
    sampler = Sampler()
    sampler.gpus.start()
    try:
        while True:
            time.sleep(INTERVAL)
            print(json.dumps(sampler.sample(), separators=(",", ":")), flush=True)
    except OSError:
        sampler.gpus.stop()


class Tail:
    """Sends the growth of an attempt's record files, a little a second, so that the control
    machine's copies grow with them. Nothing waits for it: launcher/collect.py fetches at the end
    what a copy lacks."""

    def __init__(self, folder, task):
        self.folder = folder
        self.sent_bytes = dict.fromkeys(records.names(task.attempt, task.ranks), 0)
        self.step_times = {}  # file: when a line came that ends a step or something else

    def send(self, frames):
        """Send the next piece of each file, unless the reader is behind. Returns the bytes sent."""
        total = 0
        for name, offset in self.sent_bytes.items():
            # Beats and the ranks' output go first; what is not sent is fetched at the end.
            if frames.size > BACKLOG_LIMIT:
                break
            piece = self.read(name, offset)
            if piece:
                frames.send("record", piece, file=name, offset=offset)
                self.sent_bytes[name] += len(piece)
                # A line `stall` says that a step does not end.
                if any(b'"stall"' not in line for line in piece.splitlines()):
                    self.step_times[name] = time.monotonic()
                total += len(piece)
        return total

    def send_end(self, frames):
        """Send up to END_BYTES of what was not sent yet."""
        total = 0
        while total < END_BYTES:
            size = self.send(frames)
            if not size:
                return
            total += size

    def read(self, name, offset):
        """Return whole lines from `offset` on, at most records.PIECE bytes; b"" for none."""
        try:
            # The script may have put a pipe or a link there: that must not hold up the guard.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            descriptor = os.open(str(self.folder / name), flags)
        except OSError:  # there is no file yet, or the disk fails, which its rank reports
            return b""
        try:
            piece = os.pread(descriptor, records.PIECE, offset)
        except OSError:
            return b""
        finally:
            os.close(descriptor)
        # A line longer than a piece is sent in parts.
        end = piece.rfind(b"\n") + 1
        return piece[:end] if end or len(piece) < records.PIECE else piece
