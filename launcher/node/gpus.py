"""What nvidia-smi says of this machine's GPUs, once a second."""

import os
import shutil
import signal
import subprocess
import time

from launcher.node.processes import die_with_parent

QUERY = "index,utilization.gpu,memory.used,temperature.gpu,power.draw,clocks.sm"


class Gpus:
    def __init__(self):
        self.process, self.partial = None, ""

    def start(self):
        """One nvidia-smi for as long as it is wanted: starting it takes a second or more."""
        tool = shutil.which("nvidia-smi")
        if tool is None:
            return
        parent = os.getpid()
        self.process = subprocess.Popen(
            [tool, "--query-gpu=" + QUERY, "--format=csv,noheader,nounits", "--loop=1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent),
        )
        os.set_blocking(self.process.stdout.fileno(), False)

    def read(self):
        """The samples since the last look, a dictionary a card."""
        if self.process is None:
            return []
        try:
            self.partial += os.read(self.process.stdout.fileno(), 1 << 16).decode(errors="replace")
        except BlockingIOError:
            return []
        *lines, self.partial = self.partial.split("\n")
        found = [card_of(line, time.monotonic()) for line in lines]
        return [one for one in found if one is not None]

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def card_of(line, mono):
    """One line of nvidia-smi (QUERY) as a record has it; None for any other line."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 6 or not fields[0].isdigit():
        return None
    values = [number(field) for field in fields[1:]]
    memory = None if values[1] is None else int(values[1] * 1024 * 1024)
    return {
        "mono": mono,
        "index": int(fields[0]),
        "utilization": values[0],
        "memory_used": memory,
        "temperature": values[2],
        "power": values[3],
        "clock_sm": values[4],
    }


def number(text):
    """A figure of nvidia-smi, or None for `[N/A]` and the like."""
    try:
        return float(text)
    except ValueError:
        return None
