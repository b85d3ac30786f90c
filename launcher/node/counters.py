"""Reading the kernel's counters, /proc files as text in and plain values out; and what nvidia-smi
says of GPUs."""

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
    """Counters of one interface from /proc/net/dev and /proc/net/snmp; None if it is not there."""
    for line in dev.splitlines():
        name, colon, rest = line.partition(":")
        if colon and name.strip() == interface:
            values = [int(value) for value in rest.split()]
            return {
                "rx_bytes": values[0],
                "tx_bytes": values[8],
                "rx_dropped": values[3],
                "tx_dropped": values[11],
                "tcp_retransmits": tcp_retransmits(snmp),
            }
    return None


def tcp_retransmits(snmp):
    """RetransSegs of the machine: /proc/net/snmp has a line of names, then one of values."""
    lines = [line.split() for line in snmp.splitlines() if line.startswith("Tcp:")]
    return int(lines[1][lines[0].index("RetransSegs")])


def default_interface(route, route6):
    """The interface of the default route (/proc/net/route, ipv6_route); "" without one."""
    for line in route.splitlines()[1:]:
        fields = line.split()
        if fields[1] == "00000000" and fields[7] == "00000000":
            return fields[0]
    for line in route6.splitlines():
        fields = line.split()
        if fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo":
            return fields[9]
    return ""


def processors(stat):
    """Of /proc/stat: how many processors, and the seconds since boot, summed over them, in which
    they ran something, waited for a disk, or were given to other virtual machines."""
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
    """Bytes of memory and swap now, of /proc/meminfo, and bytes that were brought from swap and put
    there since boot, of /proc/vmstat."""
    sizes = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = rest.split()[:1]
    found = {ours: int(sizes[kernel][0]) * 1024 for ours, kernel in MEMORY.items()}
    pages = dict(line.split() for line in vmstat.splitlines() if line.startswith("pswp"))
    found["swapped_in"], found["swapped_out"] = (
        int(pages.get(name, 0)) * PAGE for name in ("pswpin", "pswpout")
    )
    return found


def pressure(text):
    """Seconds since boot in which some process waited for that resource, of a file of
    /proc/pressure; None where this kernel does not say."""
    match = re.search(r"^some .*total=(\d+)", text, re.M)
    return int(match.group(1)) / 1e6 if match else None


def schedule(schedstat):
    """(seconds that a thread ran, seconds that it waited for a processor) of its schedstat."""
    ran, waited = schedstat.split()[:2]
    return int(ran) / 1e9, int(waited) / 1e9


def shares(mounts):
    """{mount point: (source, type)} of NFS and SMB mounts in /proc/self/mounts."""
    found = {}
    for line in mounts.splitlines():
        source, point, kind = line.split()[:3]
        if kind in ("nfs", "nfs4", "cifs", "smb3"):
            found[unescape(point)] = (unescape(source), "cifs" if kind == "smb3" else kind)
    return found


def unescape(text):
    """The kernel writes blanks in paths as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def nfs_read_bytes(mountstats):
    """{mount point: bytes read from the server}: the fifth value of `bytes:` in mountstats."""
    found, point = {}, None
    for line in mountstats.splitlines():
        words = line.split()
        if line.startswith("device "):
            point = unescape(words[4]) if " with fstype nfs" in line else None
        elif point is not None and words[:1] == ["bytes:"]:
            found[point] = int(words[5])
    return found


def cifs_read_bytes(stats):
    """{share in lower case with slashes, //server/share: bytes read} from /proc/fs/cifs/Stats.

    Kernels differ: `Bytes read: N  Bytes written: N`, or `Reads: N Bytes: N` in older ones.
    """
    found, share = {}, None
    for line in stats.splitlines():
        start = re.match(r"\d+\) (\\\\\S+)", line)
        value = re.search(r"Bytes read: (\d+)|^Reads: +\d+ Bytes: (\d+)", line)
        if start:
            share = start.group(1).replace("\\", "/").lower()
        elif value and share is not None:
            found[share] = int(value.group(1) or value.group(2))
    return found


def share_of(source):
    """//server/share of a mount's source (which may be a folder below), for cifs_read_bytes."""
    return "/".join(source.lower().split("/")[:4])


def disks(diskstats):
    """{device: counters} of /proc/diskstats, devices that never did anything left out."""
    found = {}
    for line in diskstats.splitlines():
        fields = line.split()
        values = [int(value) for value in fields[3:14]]
        if any(values):
            found[fields[2]] = dict(zip(DISK_COUNTERS, values))
    return found


def disk_rates(old, new, seconds):
    """The columns of iostat, by its names and in its units, that the report reads: of one device,
    from two readings of diskstats."""
    grown = {name: new[name] - old[name] for name in new}
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


# By its name in the records: what nvidia-smi calls it, and by what that is multiplied.
GPU_FIGURES = {
    "index": ("index", 1),
    "utilization": ("utilization.gpu", 1),
    "memory_used": ("memory.used", 1024 * 1024),  # bytes of MiB
    "temperature": ("temperature.gpu", 1),
    "power": ("power.draw", 1),
    "clock_sm": ("clocks.sm", 1),
}
GPU_INTEGERS = ("index", "memory_used")
# What an old driver prints, and nothing else, if it does not know one of them.
UNKNOWN_FIELD = re.compile(r'Field "(\S+)" is not a valid field to query')


class Gpus:
    """`process`: one nvidia-smi for as long as it is wanted, since starting it takes a second or
    more; None where there is none."""

    def __init__(self):
        self.process, self.names = None, list(GPU_FIGURES)

    def start(self):
        tool = shutil.which("nvidia-smi")
        if tool is not None:
            query = "--query-gpu=" + ",".join(GPU_FIGURES[name][0] for name in self.names)
            self.process = LineProcess([tool, query, "--format=csv,noheader,nounits", "--loop=1"])

    def read(self):
        """The samples since the last look, a dictionary a GPU."""
        lines = self.process.lines() if self.process is not None else []
        unknown = {match.group(1) for match in map(UNKNOWN_FIELD.match, lines) if match}
        known = [name for name in self.names if GPU_FIGURES[name][0] not in unknown]
        if known != self.names:
            self.stop()
            self.names = known
            self.start()
            return []
        samples = [gpu_sample(line, time.monotonic(), known) for line in lines]
        return [sample for sample in samples if sample is not None]

    def stop(self):
        if self.process is not None:
            self.process.stop()


def gpu_sample(line, mono, names=tuple(GPU_FIGURES)):
    """A line of nvidia-smi with these figures, as a record has it; None for any other line."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(names) or not fields[0].isdigit():
        return None
    sample = {"mono": mono}
    for name, field in zip(names, fields):
        value, factor = number(field), GPU_FIGURES[name][1]
        if value is not None:
            value = int(value * factor) if name in GPU_INTEGERS else value * factor
        sample[name] = value
    return sample


def number(text):
    """A figure of nvidia-smi, or None for `[N/A]` and the like."""
    try:
        return float(text)
    except ValueError:
        return None
