"""iostat.json: sysstat's iostat during an attempt, or the same figures from /proc/diskstats."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time

from launcher.node import counters
from launcher.node.processes import die_with_parent

COMMAND = ["iostat", "-o", "JSON", "-d", "-x", "-y"]
ENVIRONMENT = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", "S_TIME_FORMAT": "ISO"}
INTERVAL = 1.0  # seconds


class DiskRecorder:
    """Writes a part file during the attempt, so a guard that is killed loses at most one sample."""

    def __init__(self, folder, attempt, data):
        self.folder, self.attempt, self.data = folder, attempt, data
        self.process, self.file, self.last = None, None, None

    def start(self):
        """Begin, with iostat where it is installed. Raises OSError (full disk)."""
        source = "iostat" if has_iostat() else "diskstats"
        now = time.monotonic()
        entry = {"attempt": self.attempt, "source": source, "mono_start": now, "interval": INTERVAL}
        if self.data:
            entry["data_disk"] = disk_of(self.data)
        self.file = (self.folder / ".iostat.{}.part".format(self.attempt)).open("wb", buffering=0)
        self.file.write(json.dumps(entry).encode() + b"\n")
        if source == "diskstats":
            self.file.write(header().encode())
            self.last = (now, read_disks())
        else:
            self.start_iostat()

    def start_iostat(self):
        """iostat appends to the part file by itself, so recording costs the guard nothing."""
        guard = os.getpid()
        self.process = subprocess.Popen(
            [*COMMAND, str(int(INTERVAL))],
            stdin=subprocess.DEVNULL,
            stdout=self.file,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL, guard),
        )

    def sample(self):
        """Write one report where /proc/diskstats is the source. Raises OSError (full disk)."""
        if self.last is None:
            return
        now, new = time.monotonic(), read_disks()
        then, old = self.last
        rows = [
            dict({"disk_device": name}, **counters.disk_rates(old[name], new[name], now - then))
            for name in new
            if name in old
        ]
        self.file.write(json.dumps({"disk": rows}).encode() + b",\n")
        self.last = (now, new)

    def stop(self):
        """End iostat, and gather all part files, also of guards that were killed."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)  # iostat then completes its document
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.file is not None:
            self.file.close()
        gather(self.folder)


def has_iostat():
    """Whether iostat is installed and knows JSON (sysstat >= 11.5)."""
    try:
        code = subprocess.call(
            COMMAND[:-1],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
    except OSError:
        return False
    return code == 0


def read_disks():
    """Counters of whole disks: a partition's are in its disk's already."""
    found = counters.disks(pathlib.Path("/proc/diskstats").read_text())
    block = pathlib.Path("/sys/block")
    return {name: value for name, value in found.items() if (block / name).exists()}


def disk_of(path):
    """The disk, as iostat names it, that holds a path; None for shares, overlays and memory."""
    try:
        device = pathlib.Path(path).stat().st_dev
        place = pathlib.Path("/sys/dev/block/{}:{}".format(os.major(device), os.minor(device)))
        place = place.resolve(strict=True)
    except OSError:
        return None
    return place.parent.name if (place / "partition").exists() else place.name


def header():
    """The beginning of a document such as iostat writes."""
    names = os.uname()
    host = {
        "nodename": names.nodename,
        "sysname": names.sysname,
        "release": names.release,
        "machine": names.machine,
        "number-of-cpus": os.cpu_count(),
    }
    return '{"sysstat": {"hosts": [' + json.dumps(host)[:-1] + ', "statistics": [\n'


def complete(text):
    """The document in a text of iostat, which may have been cut anywhere to its last whole report.

    Returns the value of `sysstat`, or None when not even its head is there.
    """
    start = text.find('"statistics"')
    opening = text.find("[", start)
    if start < 0 or opening < 0:
        return None
    document = json.loads(text[: opening + 1] + "]}]}}", strict=False)["sysstat"]
    reports, decoder, position = document["hosts"][0]["statistics"], json.JSONDecoder(), opening + 1
    while True:
        found = re.compile(r"[\s,]*(?=\{)").match(text, position)
        if found is None:
            return document
        try:
            report, position = decoder.raw_decode(text, found.end())
        except ValueError:
            return document
        reports.append(report)


def gather(folder):
    """Move all part files into iostat.json; each is deleted only when its figures are safe."""
    target, parts = folder / "iostat.json", []
    attempts = read_attempts(target)
    for path in sorted(folder.glob(".iostat.*.part")):
        first, _, text = path.read_text(errors="replace").partition("\n")
        entry = entry_of(first)
        if entry is not None:
            # An attempt may end before iostat's first report: it gets an entry without reports.
            attempts.append(dict(entry, sysstat=complete(text) or complete(header())))
        parts.append(path)
    if parts:
        write_json(target, {"attempts": sorted(attempts, key=lambda entry: entry["attempt"])})
    for path in parts:
        path.unlink()


def entry_of(line):
    """The first line of a part file, or None when a full disk left none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def read_attempts(path):
    """The list `attempts` in a file of the run directory; empty when it cannot be read."""
    try:
        return list(json.loads(path.read_text())["attempts"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write_json(path, value):
    """Replace a file as a whole, or leave the old one. Raises OSError."""
    fresh = path.with_name(".{}.new".format(path.name))
    try:
        fresh.write_text(json.dumps(value) + "\n")
        fresh.replace(path)
    except OSError:
        if fresh.exists():
            fresh.unlink()
        raise
