"""What nvidia-smi says of this machine's GPUs, once a second."""

import shutil
import time

from launcher.node.processes import LineProcess

# By its name in the records: what nvidia-smi calls it, and by what that is multiplied.
FIGURES = {
    "index": ("index", 1),
    "utilization": ("utilization.gpu", 1),
    "memory_used": ("memory.used", 1024 * 1024),  # bytes of MiB
    "temperature": ("temperature.gpu", 1),
    "power": ("power.draw", 1),
    "clock_sm": ("clocks.sm", 1),
}
WHOLE = ("index", "memory_used")  # numbers


class Gpus:
    """`process`: one nvidia-smi for as long as it is wanted, since starting it takes a second or
    more; None where there is none."""

    def __init__(self):
        self.process = None

    def start(self):
        tool = shutil.which("nvidia-smi")
        if tool is not None:
            query = "--query-gpu=" + ",".join(theirs for theirs, _ in FIGURES.values())
            self.process = LineProcess([tool, query, "--format=csv,noheader,nounits", "--loop=1"])

    def read(self):
        """The samples since the last look, a dictionary a GPU."""
        lines = self.process.lines() if self.process is not None else []
        samples = [sample_of(line, time.monotonic()) for line in lines]
        return [sample for sample in samples if sample is not None]

    def stop(self):
        if self.process is not None:
            self.process.stop()


def sample_of(line, mono):
    """One line of nvidia-smi as a record has it; None for any other line."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(FIGURES) or not fields[0].isdigit():
        return None
    sample = {"mono": mono}
    for (name, (_, factor)), field in zip(FIGURES.items(), fields):
        value = number(field)
        if value is not None:
            value = int(value * factor) if name in WHOLE else value * factor
        sample[name] = value
    return sample


def number(text):
    """A figure of nvidia-smi, or None for `[N/A]` and the like."""
    try:
        return float(text)
    except ValueError:
        return None
