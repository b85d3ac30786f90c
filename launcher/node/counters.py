"""Parses the kernel's counters (/proc files as text in, plain values out) and reads nvidia-smi."""

import os
import re
import shutil
import time

from launcher.node.processes import TICK, LineProcess

PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes; the unit of /proc/vmstat
SECTOR = 512  # bytes; the unit of /proc/diskstats whatever the disk
DISK_COUNTERS = (
    "reads",
    "reads_merged",
    "sectors_read",
    "ms_reading",
    "writes",
    "writes_merged",
    "sectors_written",
    "ms_writing",
    "in_flight",
    "ms_busy",
    "ms_weighted",
)


def network(dev, snmp, interface):
    """Return one interface's counters, from /proc/net/dev and /proc/net/snmp; None without it."""
    # Each line has the name of an interface, a colon, and 16 numbers in the kernel's order.
    for line in dev.splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() == interface:
            values = [int(value) for value in figures.split()]
            return {
                "rx_bytes": values[0],
                "tx_bytes": values[8],
                "rx_dropped": values[3],
                "tx_dropped": values[11],
                "tcp_retransmits": tcp_retransmits(snmp),
            }
    return None


def tcp_retransmits(snmp):
    """Return the segments that this machine sent again, RetransSegs of /proc/net/snmp."""
    # A line of names comes first, then a line of values.
    lines = [line.split() for line in snmp.splitlines() if line.startswith("Tcp:")]
    return int(lines[1][lines[0].index("RetransSegs")])


def default_interface(route, route6):
    """Return the interface of the default route (/proc/net/route, ipv6_route); "" if none."""
    # Destination and mask are 0 in a default route.
    for line in route.splitlines()[1:]:
        fields = line.split()
        if fields[1] == "00000000" and fields[7] == "00000000":
            return fields[0]
    for line in route6.splitlines():
        fields = line.split()
        # The kernel has an unreachable default route of IPv6 on the loopback.
        if fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo":
            return fields[9]
    return ""


def processors(stat):
    """Return the number of processors in /proc/stat, and their seconds since boot, summed: busy,
    waiting for a disk, and given to other virtual machines."""
    lines = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
    user, nice, system, _, iowait, irq, softirq, steal = [int(text) for text in lines[0][1:9]]
    return {
        "cores": len(lines) - 1,
        "cpu_busy": round((user + nice + system + irq + softirq) * TICK, 2),
        "cpu_iowait": round(iowait * TICK, 2),
        "cpu_steal": round(steal * TICK, 2),
    }


MEMORY = {
    "memory_total": "MemTotal",
    "memory_available": "MemAvailable",
    "swap_total": "SwapTotal",
    "swap_free": "SwapFree",
}


def memory(meminfo, vmstat):
    """Return bytes of memory and swap now (/proc/meminfo), and bytes that came from swap and went
    there since boot (/proc/vmstat)."""
    sizes = {}
    for line in meminfo.splitlines():
        name, _, size = line.partition(":")
        sizes[name] = size.split()[:1]  # without its unit, kB
    figures = {name: int(sizes[key][0]) * 1024 for name, key in MEMORY.items()}
    # A kernel without swap has no such lines.
    pages = dict(line.split() for line in vmstat.splitlines() if line.startswith("pswp"))
    figures["swapped_in"], figures["swapped_out"] = (
        int(pages.get(name, 0)) * PAGE for name in ("pswpin", "pswpout")
    )
    return figures


def pressure(text):
    """Return the seconds since boot in which some process waited for the resource of this file of
    /proc/pressure; None if this kernel does not say."""
    match = re.search(r"^some .*total=(\d+)", text, re.M)
    return int(match.group(1)) / 1e6 if match else None


def schedule(schedstat):
    """Return (seconds that a thread ran, seconds that it waited for a processor)."""
    ran, waited = schedstat.split()[:2]
    return int(ran) / 1e9, int(waited) / 1e9


def shares(mounts):
    """Return {mount point: (source, type)} of NFS and SMB mounts in /proc/self/mounts."""
    shares = {}
    for line in mounts.splitlines():
        source, point, kind = line.split()[:3]
        if kind in ("nfs", "nfs4", "cifs", "smb3"):
            shares[unescape(point)] = (unescape(source), "cifs" if kind == "smb3" else kind)
    return shares


def unescape(text):
    """Decode a path: the kernel writes its blanks as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def nfs_read_bytes(mountstats):
    """Return {mount point: bytes read from the server}."""
    read_bytes, point = {}, None
    for line in mountstats.splitlines():
        words = line.split()
        if line.startswith("device "):
            point = unescape(words[4]) if " with fstype nfs" in line else None
        elif point is not None and words[:1] == ["bytes:"]:
            read_bytes[point] = int(words[5])
    return read_bytes


def cifs_read_bytes(stats):
    """Return {share in lower case with slashes, //server/share: bytes read}, from
    /proc/fs/cifs/Stats."""
    read_bytes, share = {}, None
    for line in stats.splitlines():
        start = re.match(r"\d+\) (\\\\\S+)", line)
        # Older kernels have the second form.
        value = re.search(r"Bytes read: (\d+)|^Reads: +\d+ Bytes: (\d+)", line)
        if start:
            share = start.group(1).replace("\\", "/").lower()
        elif value and share is not None:
            read_bytes[share] = int(value.group(1) or value.group(2))
    return read_bytes


def share_name(source):
    """Return //server/share of an SMB mount's source, as cifs_read_bytes spells it."""
    # The source may be a folder below the share.
    return "/".join(source.lower().split("/")[:4])


def disks(diskstats):
    """Return {device: counters} of /proc/diskstats, without devices that never did anything."""
    counters = {}
    for line in diskstats.splitlines():
        fields = line.split()
        values = [int(value) for value in fields[3:14]]
        if any(values):
            counters[fields[2]] = dict(zip(DISK_COUNTERS, values))
    return counters


def disk_rates(before, after, seconds):
    """Return the columns of iostat that the report reads, by its names and in its units, from one
    device's counters before and after these `seconds`."""
    grown = {name: after[name] - before[name] for name in after}
    reads, writes = grown["reads"], grown["writes"]
    read_kb = grown["sectors_read"] * SECTOR / 1024
    write_kb = grown["sectors_written"] * SECTOR / 1024
    return {
        "r/s": round(reads / seconds, 2),
        "w/s": round(writes / seconds, 2),
        "rkB/s": round(read_kb / seconds, 2),
        "wkB/s": round(write_kb / seconds, 2),
        "r_await": round(grown["ms_reading"] / reads, 2) if reads else 0.0,
        "w_await": round(grown["ms_writing"] / writes, 2) if writes else 0.0,
        "aqu-sz": round(grown["ms_weighted"] / 1000 / seconds, 2),
        "util": round(min(100.0, grown["ms_busy"] / 10 / seconds), 2),
    }


# {name in the records: (nvidia-smi's name, factor)}
GPU_FIGURES = {
    "index": ("index", 1),
    "utilization": ("utilization.gpu", 1),
    "memory_used": ("memory.used", 1024 * 1024),  # bytes of MiB
    "temperature": ("temperature.gpu", 1),
    "power": ("power.draw", 1),
    "clock_sm": ("clocks.sm", 1),
}
GPU_INTEGERS = ("index", "memory_used")
# An old driver that lacks one of these fields prints this and nothing else.
UNKNOWN_FIELD = re.compile(r'Field "(\S+)" is not a valid field to query')


class Gpus:
    """Reads the samples of a running nvidia-smi, since its start takes a second or more. `process`
    is None on a machine without nvidia-smi."""

    def __init__(self):
        self.process, self.names = None, list(GPU_FIGURES)

    def start(self):
        tool = shutil.which("nvidia-smi")
        if tool is not None:
            query = "--query-gpu=" + ",".join(GPU_FIGURES[name][0] for name in self.names)
            self.process = LineProcess([tool, query, "--format=csv,noheader,nounits", "--loop=1"])

    def read(self):
        """Return the samples since the last look, a dictionary for each line."""
        lines = self.process.lines() if self.process is not None else []
        unknown = {match.group(1) for match in map(UNKNOWN_FIELD.match, lines) if match}
        names = [name for name in self.names if GPU_FIGURES[name][0] not in unknown]
        # An old driver refuses the whole query: ask again without the fields that it lacks.
        if names != self.names:
            self.stop()
            self.names = names
            self.start()
            return []
        samples = [gpu_sample(line, time.monotonic(), names) for line in lines]
        return [sample for sample in samples if sample is not None]

    def stop(self):
        if self.process is not None:
            self.process.stop()


def gpu_sample(line, mono, names=tuple(GPU_FIGURES)):
    """Parse a line of nvidia-smi that has the figures `names`; return None for other lines."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(names) or not fields[0].isdigit():
        return None
    sample = {"mono": mono}
    for name, field in zip(names, fields):
        try:
            value = float(field) * GPU_FIGURES[name][1]
            sample[name] = int(value) if name in GPU_INTEGERS else value
        except ValueError:  # `[N/A]` and the like
            sample[name] = None
    return sample
