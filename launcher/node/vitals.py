"""How this machine is now: processors, memory, swap, disk, network card, shares, GPUs, temperature.
What is counted is told as what has come since it was read the last time."""

import json
import pathlib
import time

from launcher.node import counters
from launcher.node.disks import disk_of, read_disks
from launcher.node.gpus import Gpus

# Sensors of processors, as their drivers call themselves in /sys/class/hwmon.
PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


def text_of(path):
    """A file of the kernel's, or "" where there is none."""
    try:
        return pathlib.Path(path).read_text(errors="replace")
    except OSError:
        return ""


def default_card():
    """The card of the default route, else the loopback."""
    routes = text_of("/proc/net/route"), text_of("/proc/net/ipv6_route")
    return counters.default_interface(*routes) or "lo"


def hottest():
    """The hottest processor in degrees Celsius; None where no sensor tells."""
    found = []
    for folder in pathlib.Path("/sys/class/hwmon").glob("hwmon*"):
        if text_of(folder / "name").strip() in PROCESSORS:
            texts = [text_of(path).strip() for path in folder.glob("temp*_input")]
            found += [int(text) / 1000 for text in texts if text.isdigit()]
    return max(found, default=None)


def processors(stat):
    """How many there are, and the seconds in which they ran something, of /proc/stat."""
    found = counters.processors(stat)
    return max(1, found["cores"]), found["cpu_busy"]


def memory(meminfo):
    """The percentage of memory that is not available to new programs, and bytes of swap in use."""
    found = counters.memory(meminfo, "")
    free = found["memory_available"] / max(1, found["memory_total"])
    swap = found["swap_total"] - found["swap_free"]
    return {"memory": round(100 * (1 - free), 1), "swap": swap}


class Vitals:
    """`gpus` returns the last that was seen of each GPU, as gpu.jsonl has it; `threads` the seconds
    that the threads of each rank ran and waited for a processor, as machine.jsonl has them."""

    def __init__(self, interface="", data="", gpus=lambda: [], threads=dict):
        self.interface, self.gpus, self.threads = interface or default_card(), gpus, threads
        self.disk = disk_of(data) if data else None
        self.mono, self.before = time.monotonic(), self.counted()

    def counted(self):
        """What only grows: {name: numbers}."""
        self.cores, busy = processors(text_of("/proc/stat"))
        found = {"cpu": (busy,)}
        card = counters.network(text_of("/proc/net/dev"), text_of("/proc/net/snmp"), self.interface)
        if card is not None:
            dropped = card["rx_dropped"] + card["tx_dropped"]
            again = card["tcp_retransmits"]
            found["card"] = (card["rx_bytes"], card["tx_bytes"], again, dropped)
        disk = self.busiest(read_disks())
        if disk is not None:
            read, written = disk["sectors_read"], disk["sectors_written"]
            found["disk"] = (read * counters.SECTOR, written * counters.SECTOR, disk["ms_busy"])
        swap = counters.memory(text_of("/proc/meminfo"), text_of("/proc/vmstat"))
        found["swapped"] = (swap["swapped_in"], swap["swapped_out"])
        stalled = counters.pressure(text_of("/proc/pressure/memory"))
        if stalled is not None:
            found["stalled"] = (stalled,)
        mounts = counters.shares(text_of("/proc/self/mounts"))
        if mounts:
            found["share"] = (counters.shares_read(mounts, text_of),)
        return found

    def busiest(self, disks):
        """The disk with the data; where that is not known, the one that was busiest since boot."""
        if self.disk in disks:
            return disks[self.disk]
        return max(disks.values(), key=lambda one: one["ms_busy"], default=None)

    def size(self):
        """What does not change: `cores`, and `memory` in bytes."""
        total = counters.memory(text_of("/proc/meminfo"), "")["memory_total"]
        return {"cores": self.cores, "memory": total}

    def read(self):
        """The figures: `cpu` and `memory` in percent, `swap` in use in bytes, `temperature`,
        `disk` (percent busy, bytes read, written), `card` (bytes received, sent, segments sent
        again, packets dropped), `share` (bytes read), `swapped` (bytes from swap, to it), `stalled`
        (seconds in which something waited for memory), `threads`, `gpus`. What is not known is left
        out."""
        now, new = time.monotonic(), self.counted()
        grown = {
            name: [max(0, one - old) for one, old in zip(new[name], self.before[name])]
            for name in new
            if name in self.before
        }
        passed = max(1e-3, now - self.mono)
        self.mono, self.before = now, new
        told = memory(text_of("/proc/meminfo"))
        told["cpu"] = round(min(100.0, 100 * grown.pop("cpu")[0] / passed / self.cores), 1)
        if "disk" in grown:
            read, written, spent = grown.pop("disk")
            told["disk"] = [round(min(100.0, spent / 10 / passed), 1), read, written]
        if "stalled" in grown:
            told["stalled"] = round(grown.pop("stalled")[0], 2)
        if "share" in grown:
            told["share"] = grown.pop("share")[0]
        told.update(grown)
        temperature = hottest()
        if temperature is not None:
            told["temperature"] = temperature
        threads = self.threads()
        if threads:
            told["threads"] = {
                rank: [round(one["ran"], 1), round(one["waited"], 1)]
                for rank, one in threads.items()
            }
        gpus = [gpu_row(one) for one in self.gpus()]
        if gpus:
            told["gpus"] = gpus
        return told


def gpu_row(sample):
    """[index, percent, bytes, degrees, watts, MHz]"""
    names = ("index", "utilization", "memory_used", "temperature", "power", "clock_sm")
    return [sample[name] for name in names]


def stream():
    """Print this machine's figures once a second, until nobody reads them."""
    gpus = Gpus()
    gpus.start()
    vitals = Vitals(gpus=gpus.latest.values)
    try:
        while True:
            time.sleep(1.0)
            gpus.read()
            print(json.dumps(vitals.read(), separators=(",", ":")), flush=True)
    except OSError:
        gpus.stop()
