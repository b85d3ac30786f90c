"""Parses the counters of the kernel: a function gets the text of a file of /proc, and returns plain
values. Also reads the samples of nvidia-smi. records.py reads the files and calls these functions.
"""

import os
import re
import shutil
import time

from launcher.node.processes import TICK, LineProcess

PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes; the unit of swap in /proc/vmstat
SECTOR = 512  # bytes; the unit of /proc/diskstats for all disks
# The columns of /proc/diskstats after the device's name, in the kernel's order.
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


def parse_interface(net_dev, snmp, interface):
    """Return the counters of an interface, from /proc/net/dev, and the number of TCP segments that
    this machine sent again, from /proc/net/snmp. Returns None if there is no such interface."""
    # `  eth0: 9120 12 0 1 0 0 0 0 34 1 0 0 0 0 0 0`: eight received figures, then eight sent ones.
    # Of each eight, the first is bytes and the fourth is dropped packets.
    for line in net_dev.splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() == interface:
            received, sent = figures.split()[:8], figures.split()[8:]
            # `Tcp: RtoAlgorithm ... RetransSegs ...` has names, and `Tcp: 1 ... 42 ...` has values.
            names, values = [row.split() for row in snmp.splitlines() if row.startswith("Tcp:")]
            return {
                "rx_bytes": int(received[0]),
                "tx_bytes": int(sent[0]),
                "rx_dropped": int(received[3]),
                "tx_dropped": int(sent[3]),
                "tcp_retransmits": int(values[names.index("RetransSegs")]),
            }
    return None


def find_default_interface(ipv4_routes, ipv6_routes):
    """Return the interface of the default route in /proc/net/route, or else in
    /proc/net/ipv6_route; "" if there is none."""
    # `eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0`: interface, destination, ..., mask, ...
    # The destination and the mask of a default route are 0. The first line has titles.
    for line in ipv4_routes.splitlines()[1:]:
        interface, destination, _, _, _, _, _, mask = line.split()[:8]
        if destination == mask == "00000000":
            return interface
    # `00000000000000000000000000000000 00 ... eth0`: destination, length of its prefix, ...,
    # interface. The kernel has an unreachable default route of IPv6 on the loopback.
    for line in ipv6_routes.splitlines():
        fields = line.split()
        destination, prefix_length, interface = fields[0], fields[1], fields[9]
        if destination == "0" * 32 and prefix_length == "00" and interface != "lo":
            return interface
    return ""


def parse_processors(stat):
    """Return the number of processors in /proc/stat, and sums of their seconds since boot: busy,
    waiting for a disk, and given to other virtual machines."""
    # `cpu  user nice system idle iowait irq softirq steal ...` are ticks of all processors. A line
    # `cpu0 ...` follows for each processor. (The ticks of guests after `steal` are in `user`, too.)
    lines = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
    user, nice, system, _, iowait, irq, softirq, steal = [int(text) for text in lines[0][1:9]]
    return {
        "cores": len(lines) - 1,
        "cpu_busy": round((user + nice + system + irq + softirq) * TICK, 2),
        "cpu_iowait": round(iowait * TICK, 2),
        "cpu_steal": round(steal * TICK, 2),
    }


# {name in the records: name in /proc/meminfo}
MEMORY = {
    "memory_total": "MemTotal",
    "memory_available": "MemAvailable",
    "swap_total": "SwapTotal",
    "swap_free": "SwapFree",
}


def parse_memory(meminfo, vmstat):
    """Return the bytes of memory and swap now (/proc/meminfo), and the bytes that were read from
    swap and written to swap since boot (/proc/vmstat)."""
    sizes_kb = {}
    for line in meminfo.splitlines():  # `MemTotal:       16318772 kB`
        name, _, size = line.partition(":")
        sizes_kb[name] = size.split()[:1]  # only the lines of MEMORY are sure to have a number
    figures = {name: int(sizes_kb[key][0]) * 1024 for name, key in MEMORY.items()}
    # `pswpin 1024` is a number of pages. A kernel without swap has no such lines.
    pages = dict(line.split() for line in vmstat.splitlines() if line.startswith("pswp"))
    figures["swapped_in"] = int(pages.get("pswpin", 0)) * PAGE
    figures["swapped_out"] = int(pages.get("pswpout", 0)) * PAGE
    return figures


def parse_pressure(text):
    """Return the seconds since boot in which some process waited for a resource, from its file in
    /proc/pressure; None if this kernel has no such file."""
    # `some avg10=0.00 avg60=0.00 avg300=0.00 total=249511522`, in microseconds.
    match = re.search(r"^some .*total=(\d+)", text, re.M)
    return int(match.group(1)) / 1e6 if match else None


def parse_shares(mounts):
    """Return {mount point: (source, type)} of NFS and SMB mounts in /proc/self/mounts."""
    shares = {}
    for line in mounts.splitlines():  # `nas:/export /srv/data nfs4 rw,relatime 0 0`
        source, point, kind = line.split()[:3]
        # smb3 is another name of cifs.
        if kind in ("nfs", "nfs4", "cifs", "smb3"):
            shares[decode_path(point)] = (decode_path(source), "cifs" if kind == "smb3" else kind)
    return shares


def decode_path(text):
    """Return a path that the kernel wrote in a table, with a blank as `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def parse_nfs_reads(mountstats):
    """Return {mount point: bytes read from the server}, from /proc/self/mountstats."""
    read_bytes, point = {}, None
    # A mount begins with `device nas:/export mounted on /srv/data with fstype nfs4 statvers=1.1`.
    # One of its lines is `bytes: 0 0 0 0 52428800 0 0 0`, whose fifth number is the bytes that were
    # read from the server. The first four count what programs read and wrote.
    for line in mountstats.splitlines():
        words = line.split()
        if line.startswith("device "):
            point = decode_path(words[4]) if " with fstype nfs" in line else None
        elif point is not None and words[:1] == ["bytes:"]:
            numbers = words[1:]
            read_bytes[point] = int(numbers[4])
    return read_bytes


def parse_cifs_reads(stats):
    """Return {//server/share in lower case: bytes read}, from /proc/fs/cifs/Stats."""
    read_bytes, share = {}, None
    # `1) \\nas\Images` begins a share. `Bytes read: 41943040  Bytes written: 1000` follows, or on
    # older kernels `Reads:  4 Bytes: 4096`.
    for line in stats.splitlines():
        start = re.match(r"\d+\) (\\\\\S+)", line)
        value = re.search(r"Bytes read: (\d+)|^Reads: +\d+ Bytes: (\d+)", line)
        if start:
            share = start.group(1).replace("\\", "/").lower()
        elif value and share is not None:
            read_bytes[share] = int(value.group(1) or value.group(2))
    return read_bytes


def share_name(source):
    """Return //server/share of an SMB mount's source, as parse_cifs_reads spells it."""
    # The source may be a folder below the share. Of //NAS/Images/train the first four parts count:
    # "", "", NAS and Images.
    return "/".join(source.lower().split("/")[:4])


def parse_disks(diskstats):
    """Return {device: counters} of /proc/diskstats, without devices that were never used."""
    counters = {}
    for line in diskstats.splitlines():  # `   8  0 sda 4711 12 90 3 ...`: major, minor, device
        _, _, device, *texts = line.split()
        values = [int(text) for text in texts[: len(DISK_COUNTERS)]]
        if any(values):
            counters[device] = dict(zip(DISK_COUNTERS, values))
    return counters


def compute_disk_rates(previous, current, seconds):
    """Return the columns of iostat that the report reads, by iostat's names and in its units.
    `previous`, `current`: the counters of a device, with `seconds` between them."""
    growth = {name: current[name] - previous[name] for name in current}
    reads, writes = growth["reads"], growth["writes"]
    read_kb = growth["sectors_read"] * SECTOR / 1024
    write_kb = growth["sectors_written"] * SECTOR / 1024
    return {
        "r/s": round(reads / seconds, 2),
        "w/s": round(writes / seconds, 2),
        "rkB/s": round(read_kb / seconds, 2),
        "wkB/s": round(write_kb / seconds, 2),
        "r_await": round(growth["ms_reading"] / reads, 2) if reads else 0.0,
        "w_await": round(growth["ms_writing"] / writes, 2) if writes else 0.0,
        "aqu-sz": round(growth["ms_weighted"] / 1000 / seconds, 2),
        # Percent of the time: 100 * ms / 1000 / seconds.
        "util": round(min(100.0, growth["ms_busy"] / 10 / seconds), 2),
    }


# {name in the records: (nvidia-smi's name, factor from nvidia-smi's unit to that of the records)}
GPU_FIGURES = {
    "index": ("index", 1),
    "utilization": ("utilization.gpu", 1),
    "memory_used": ("memory.used", 1024 * 1024),  # from MiB to bytes
    "temperature": ("temperature.gpu", 1),
    "power": ("power.draw", 1),
    "clock_sm": ("clocks.sm", 1),
}
GPU_INTEGERS = ("index", "memory_used")
# A driver that lacks one of these fields prints this line instead of samples.
UNKNOWN_FIELD = re.compile(r'Field "(\S+)" is not a valid field to query')


class Gpus:
    """Reads the samples of an nvidia-smi that runs all the time, because its start takes a second
    or more. `process` is None on a machine without nvidia-smi. `names`: the figures that this
    driver knows."""

    def __init__(self):
        self.process, self.names = None, list(GPU_FIGURES)

    def start(self):
        tool = shutil.which("nvidia-smi")
        if tool is not None:
            query = "--query-gpu=" + ",".join(GPU_FIGURES[name][0] for name in self.names)
            self.process = LineProcess([tool, query, "--format=csv,noheader,nounits", "--loop=1"])

    def read(self):
        """Return the samples since the last call, a dictionary for each GPU and second."""
        lines = self.process.lines() if self.process is not None else []
        unknown = {match.group(1) for match in map(UNKNOWN_FIELD.match, lines) if match}
        names = [name for name in self.names if GPU_FIGURES[name][0] not in unknown]
        # An old driver rejects the whole query. Start nvidia-smi again without the unknown fields.
        if names != self.names:
            self.stop()
            self.names = names
            self.start()
            return []
        samples = [parse_gpu_sample(line, time.monotonic(), names) for line in lines]
        return [sample for sample in samples if sample is not None]

    def stop(self):
        if self.process is not None:
            self.process.stop()


def parse_gpu_sample(line, mono, names=tuple(GPU_FIGURES)):
    """Parse a line of nvidia-smi with the figures `names`, such as `1, 97, 10842, 74, 249.8, 1905`.
    Returns a dictionary by these names, or None for another line. `mono`: when the line was read,
    by the monotonic clock."""
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
