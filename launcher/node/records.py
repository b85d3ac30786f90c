"""Records a machine during an attempt: Recorder writes a line a second into
machine.<attempt>.jsonl (docs/run-directory.md), and Tail sends the new lines to the control node.
The guard calls both. `make top` prints the same lines between runs. counters.py parses the texts of
the kernel.

A line has the kernel's counters, so that the difference of any two lines says what happened between
them. Only disks have rates: over the time since the previous line, as iostat -x prints them.
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
# Of all files together, sent after the last process has ended: collect.py fetches what remains.
END_BYTES = 1 << 18
BACKLOG_LIMIT = 1 << 16  # while more bytes of frames wait for the reader, no records are added
# After this number of lines every second sample is recorded, then every fourth, and so on.
DECIMATE_AFTER = 20000
SEARCH_EVERY = 10  # samples between two searches for a rank's other processes
MOST_THREADS = 512  # of a rank, whose times are read: each is a file, once a second
RANK_TIMES = ("ran", "waited", "loaders", "loaders_busy")  # attributes of CpuTimes, in seconds
# The names of drivers of processors' sensors in /sys/class/hwmon.
PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
# Errors while a file of the kernel is read and parsed. Another kernel may have another format.
READ_ERRORS = (OSError, ValueError, KeyError, IndexError)


def read_text(path):
    """Read a file of the kernel's; return "" if there is none."""
    try:
        return pathlib.Path(path).read_text(errors="replace")
    except OSError:
        return ""


def read_disks():
    """Return {disk: counters} of whole disks, whose counters include those of their partitions."""
    disks = counters.parse_disks(read_text("/proc/diskstats"))
    block = pathlib.Path("/sys/block")
    return {name: value for name, value in disks.items() if (block / name).exists()}


def disk_of(path):
    """Return iostat's name of the disk with this path; None for shares, overlays and memory."""
    # The link /sys/dev/block/8:1 leads to .../block/sda/sda1, and 8:0 leads to .../block/sda.
    try:
        device = pathlib.Path(path).stat().st_dev
        link = pathlib.Path("/sys/dev/block/{}:{}".format(os.major(device), os.minor(device)))
        folder = link.resolve(strict=True)
    except OSError:
        return None
    return folder.parent.name if (folder / "partition").exists() else folder.name


class CpuTimes:
    """Sums the seconds in which the threads of a rank's processes `ran`, and `waited` for a
    processor. The processes are the rank and its descendants. The times of threads that have ended
    stay in the sums.

    `loaders`: the seconds in which the descendants ran or waited. `loaders_busy`: the same seconds,
    each weighted by the fraction of the time in which its process was busy. The ratio of the two is
    how busy the active loaders are. Processes that sleep, as wandb does, do not lower that ratio.
    """

    def __init__(self, pid):
        self.pid, self.pids, self.look_count = pid, [pid], 0
        self.ran = self.waited = self.loaders = self.loaders_busy = 0.0
        # {folder in /proc of a thread: (ran, waited)} of the last look, in seconds.
        self.threads, self.look_time = {}, time.monotonic()
        self.has_times = False  # the times of a thread were read

    def state(self):
        """Return the state of the rank's processes, a letter as in ps: T if one is stopped, else D
        if one waits for a disk or a server, else that of the rank; "" if the rank is gone."""
        stats = map(stat_of, self.pids)
        states = [stat.state if stat is not None else "" for stat in stats]
        return next((letter for letter in "TD" if letter in states), states[0])

    def look(self):
        """Add the seconds since the last look."""
        # A search reads all of /proc, so it is rare, and finds new loaders a few seconds late.
        if self.look_count % SEARCH_EVERY == 0:
            self.pids = [self.pid, *descendants(self.pid)]
        self.look_count += 1
        threads, previous_time, self.look_time = {}, self.look_time, time.monotonic()
        passed = self.look_time - previous_time
        for pid in self.pids:
            busy = 0.0  # seconds of this process since the last look
            for folder in list_threads(pid)[: MOST_THREADS - len(threads)]:
                text = read_text(str(folder / "schedstat"))
                if text:
                    self.has_times = True
                    # `208381000000 124015000 2`: nanoseconds that the thread ran, nanoseconds that
                    # the thread waited for a processor, and the number of time slices.
                    ran_total, waited_total = [int(number) / 1e9 for number in text.split()[:2]]
                    threads[folder] = ran_total, waited_total
                    ran_before, waited_before = self.threads.get(folder, (0.0, 0.0))
                    # A difference is negative if the thread has the number of an ended thread.
                    ran = max(0.0, ran_total - ran_before)
                    waited = max(0.0, waited_total - waited_before)
                    self.ran += ran
                    self.waited += waited
                    busy += ran + waited
            # Every other process of the rank counts as a loader, and as one busy loader at most,
            # even if it has several busy threads.
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
    """Samples the state of this machine. `pids()` returns {rank: pid} of the ranks that live.
    `folder`: of the run's files, for the free space on their disk. `data`: of the data, whose disk
    is in each line. A figure that cannot be read is missing in the sample, and reported by
    `report_trouble(subject, cause)`."""

    def __init__(self, interface="", data="", folder=None, pids=dict, report_trouble=None):
        if not interface:
            routes = read_text("/proc/net/route"), read_text("/proc/net/ipv6_route")
            interface = counters.find_default_interface(*routes) or "lo"
        self.interface = interface
        self.data_disk = disk_of(data) if data else None
        self.folder, self.pids = folder, pids
        self.report_trouble = report_trouble or (lambda subject, cause: None)
        self.gpus, self.peers = counters.Gpus(), Peers()
        self.cpu_times = {}  # {rank: CpuTimes} of the ranks in the newest line
        self.gpu_busy_time = 0.0  # when a GPU was last seen busy, by the monotonic clock
        # Fields of a line, `alone` and `only_received`, which say that ranks train apart.
        self.signs = {}
        self.finished = []  # ranks that ended with exit code 0
        # When the disks were read for the previous line, and their {disk: counters}.
        self.disks_read_at, self.disk_counters = time.monotonic(), read_disks()
        # {subject of a report: method that returns fields of a line}.
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
        # A figure that cannot be read must not keep the other figures from the line.
        for name, read in self.readers.items():
            try:
                line.update(read())
            except READ_ERRORS as error:
                self.report_trouble(name, "{}: {}".format(type(error).__name__, error))
        return line

    def processors(self):
        return counters.parse_processors(read_text("/proc/stat"))

    def memory(self):
        figures = counters.parse_memory(read_text("/proc/meminfo"), read_text("/proc/vmstat"))
        for resource in ("cpu", "memory", "io"):
            pressure = counters.parse_pressure(read_text("/proc/pressure/" + resource))
            if pressure is not None:
                figures["pressure_" + resource] = pressure
        return figures

    def temperature(self):
        """Return the hottest processor's temperature in degrees Celsius; {} without a sensor."""
        degrees = []
        # A PC also has sensors of its board and its disks, which are skipped.
        for folder in pathlib.Path("/sys/class/hwmon").glob("hwmon*"):
            if read_text(folder / "name").strip() in PROCESSOR_SENSORS:
                texts = [read_text(path).strip() for path in folder.glob("temp*_input")]
                # `45000` is 45 degrees.
                degrees += [int(text) / 1000 for text in texts if text.isdigit()]
        return {"temperature": max(degrees)} if degrees else {}

    def free_disk_bytes(self):
        free_bytes = disk_free(self.folder) if self.folder is not None else None
        return {} if free_bytes is None else {"disk_free": free_bytes}

    def ranks(self):
        """Return the state and the CpuTimes of each rank that lives, its loaders included."""
        pids = self.pids()
        self.cpu_times = {rank: self.cpu_times.get(rank) or CpuTimes(pids[rank]) for rank in pids}
        ranks = {}
        for rank, cpu_times in self.cpu_times.items():
            cpu_times.look()
            ranks[str(rank)] = {"state": cpu_times.state()}
            # Without /proc/<pid>/task/*/schedstat the times are unknown, not 0. A rank that has
            # just ended keeps the times that were read before.
            if cpu_times.has_times:
                times = {name: round(getattr(cpu_times, name), 3) for name in RANK_TIMES}
                ranks[str(rank)].update(times)
        finished = {"finished": self.finished} if self.finished else {}
        return dict(self.signs, ranks=ranks, **finished) if ranks else finished

    def interface_counters(self):
        net_dev, snmp = read_text("/proc/net/dev"), read_text("/proc/net/snmp")
        figures = counters.parse_interface(net_dev, snmp, self.interface)
        if figures is None:
            raise OSError("there is no network interface {}".format(self.interface))
        speed = read_text("/sys/class/net/{}/speed".format(self.interface)).strip()
        figures.update(interface=self.interface)
        if speed.isdigit():  # the driver writes -1, or nothing, if the speed is unknown
            figures["speed_mbit"] = int(speed)
        try:
            peers = self.peers.look()
        except OSError:  # this kernel has no socket diagnostics
            peers = {}
        if peers:
            figures["peers"] = peers
        return {"card": figures}  # the name in the record

    def disk_rates(self):
        """Return the rates since the previous line of used disks, and of the disk with the data."""
        # Unused disks are omitted, because a PC may have dozens of block devices (snap makes them).
        counters_before, time_before = self.disk_counters, self.disks_read_at
        # Both change or none: read_disks may raise.
        self.disks_read_at, self.disk_counters = time.monotonic(), read_disks()
        passed = max(1e-3, self.disks_read_at - time_before)
        rates = {}
        for name, figures in self.disk_counters.items():
            previous = counters_before.get(name)
            if previous is not None and (name == self.data_disk or figures != previous):
                rates[name] = counters.compute_disk_rates(previous, figures, passed)
        line = {} if self.data_disk is None else {"data_disk": self.data_disk}
        # Without /proc/diskstats, "no disk was used" would be a guess: the field is omitted.
        if self.disk_counters:
            line["disks"] = rates
        return line

    def mounts(self):
        """Return the bytes read from each NFS and SMB mount."""
        shares = counters.parse_shares(read_text("/proc/self/mounts"))
        if not shares:
            return {}
        nfs = counters.parse_nfs_reads(read_text("/proc/self/mountstats"))
        cifs = counters.parse_cifs_reads(read_text("/proc/fs/cifs/Stats"))
        mounts = {}
        for point, (source, kind) in shares.items():
            share = counters.share_name(source)
            read_bytes = cifs.get(share) if kind == "cifs" else nfs.get(point)
            if read_bytes is not None:
                mounts[point] = {"type": kind, "read_bytes": read_bytes}
        return {"mounts": mounts}

    def gpu_samples(self):
        """Return the newest sample since the previous line of each GPU, sorted by index."""
        samples = {}
        for sample in self.gpus.read():
            samples[sample["index"]] = sample
            # nvidia-smi has no utilization (None) of a part of a GPU (MIG), which counts as busy.
            if sample["utilization"] != 0:
                self.gpu_busy_time = sample["mono"]
        return {"gpus": [samples[index] for index in sorted(samples)]} if samples else {}


class RecordFile:
    """Appends to a file of JSON Lines. A full disk leaves no broken line in the file."""

    def __init__(self, path):
        self.path, self.fd = path, None

    def append(self, value):
        """Add a line completely or not at all. Raises OSError."""
        if self.fd is None:
            self.fd = os.open(str(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        # A full disk may take a part of a line. That part is cut off again.
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
    """Writes the file of one attempt: lines of kind `sample`, and at the end a line of kind `exit`.
    Reports errors by `report_trouble(subject, cause)` and continues."""

    def __init__(self, task, folder, report_trouble, pids=dict):
        self.task, self.report_trouble = task, report_trouble
        self.file = RecordFile(folder / records.machine(task.attempt))
        self.sampler = Sampler(task.interface, task.data, folder, pids, report_trouble)
        self.tick_count, self.ticks_per_line = 0, 1
        self.line_count = 0  # of the lines that `tick` wrote

    def write(self, line):
        """Add a line to the file. Reports an error, such as a full disk."""
        try:
            self.file.append(line)
        except OSError as error:
            self.report_trouble("records", "{}: {}".format(type(error).__name__, error))

    def begin(self):
        """Start nvidia-smi and write the first sample."""
        try:
            self.sampler.gpus.start()
        except OSError as error:
            self.report_trouble("nvidia-smi", str(error))
        self.write(self.sampler.sample())

    def tick(self):
        """Write a sample if it is due. The guard calls this every INTERVAL."""
        self.tick_count += 1
        if self.tick_count % self.ticks_per_line == 0:
            self.write(self.sampler.sample())
            self.line_count += 1
            # Lines become rarer, so that the file of a run of weeks stays small.
            if self.line_count % DECIMATE_AFTER == 0:
                self.ticks_per_line *= 2

    def end(self, entry, peaks):
        """Write the last sample and the exit line. `entry`: the fields of exit_entry. `peaks`:
        {rank: its largest memory in bytes}."""
        self.write(self.sampler.sample())
        self.sampler.gpus.stop()
        signs = self.sampler.signs
        self.write(dict({"kind": "exit"}, **entry, peak_memory_bytes=peaks, **signs))


def exit_entry(mono_start, launch_status, workers):
    """Return the fields about the end of an attempt on this node, for the record and for the exit
    frame. `mono_start`: when the guard began. `launch_status`: launch's wait status, or None if
    launch did not start."""
    code, name = decode_status(launch_status) if launch_status is not None else (None, None)
    return {
        "mono_start": mono_start,
        "mono_end": time.monotonic(),
        "exit_code": code,
        "signal": name,
        "workers": {str(worker.rank): worker.outcome() for worker in workers},
    }


LISTED_COMMANDS = 400  # processes that are listed with their command: a frame has at most 1 MiB


def list_leftovers(commands, hanging):
    """Return two lists for the exit frame: `ended`, the processes that the guard killed, and
    `left`, those of them that hang in the kernel. `commands`: {pid: command} of the processes that
    it killed; `hanging`: pids."""
    lists = {"ended": sorted(commands), "left": sorted(hanging)}
    return {
        name: [
            {"pid": pid, "command": commands[pid] if index < LISTED_COMMANDS else ""}
            for index, pid in enumerate(pids)
        ]
        for name, pids in lists.items()
    }


def stream():
    """Print a sample a second for `make top`, until the reader closes the pipe."""
    sampler = Sampler()
    sampler.gpus.start()
    try:
        while True:
            time.sleep(INTERVAL)
            print(json.dumps(sampler.sample(), separators=(",", ":")), flush=True)
    except OSError:
        sampler.gpus.stop()


class Tail:
    """Sends new lines of an attempt's record files, a piece a second, so that the copies on the
    control node grow during the run. launcher/collect.py fetches missing lines at the end."""

    def __init__(self, folder, task):
        self.folder = folder
        # {name of a file: how many of its bytes were sent}.
        self.sent_bytes = dict.fromkeys(records.names(task.attempt, task.ranks), 0)
        # {name of a file: when a line other than a `stall` line came last}.
        self.step_times = {}

    def send(self, frames):
        """Send the next piece of each file, unless the reader is slow. Returns the bytes sent."""
        total_bytes = 0
        for name, offset in self.sent_bytes.items():
            # Beats and the ranks' output have priority over records.
            if frames.size > BACKLOG_LIMIT:
                break
            piece = self.read(name, offset)
            if piece:
                frames.send("record", piece, file=name, offset=offset)
                self.sent_bytes[name] += len(piece)
                # A `stall` line reports that a step does not end, so it is no sign of activity.
                if any(b'"stall"' not in line for line in piece.splitlines()):
                    self.step_times[name] = time.monotonic()
                total_bytes += len(piece)
        return total_bytes

    def send_end(self, frames):
        """Send what remains of the files, until about END_BYTES are sent."""
        total_bytes = 0
        while total_bytes < END_BYTES:
            size = self.send(frames)
            if not size:
                return
            total_bytes += size

    def read(self, name, offset):
        """Return whole lines from `offset` on, at most records.PIECE bytes; b"" for none."""
        try:
            # The script may have put a named pipe or a link there, which must not block the guard.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            descriptor = os.open(str(self.folder / name), flags)
        except OSError:  # there is no file yet, or the disk fails, which the file's rank reports
            return b""
        try:
            piece = os.pread(descriptor, records.PIECE, offset)
        except OSError:
            return b""
        finally:
            os.close(descriptor)
        # A piece ends with a whole line, unless one line is longer than the piece.
        end = piece.rfind(b"\n") + 1
        return piece[:end] if end or len(piece) < records.PIECE else piece
