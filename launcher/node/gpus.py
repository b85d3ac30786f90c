"""What nvidia-smi says of this machine's GPUs, once a second."""

import shutil
import time

from launcher.node.processes import LineProcess

QUERY = "index,utilization.gpu,memory.used,temperature.gpu,power.draw,clocks.sm"


class Gpus:
    """`teller`: one nvidia-smi for as long as it is wanted, since starting it takes a second or
    more; None where there is none."""

    def __init__(self):
        self.teller = None

    def start(self):
        tool = shutil.which("nvidia-smi")
        if tool is not None:
            query = ["--query-gpu=" + QUERY, "--format=csv,noheader,nounits", "--loop=1"]
            self.teller = LineProcess([tool, *query])

    def read(self):
        """The samples since the last look, a dictionary a card."""
        lines = self.teller.lines() if self.teller is not None else []
        cards = [card_of(line, time.monotonic()) for line in lines]
        return [card for card in cards if card is not None]

    def stop(self):
        if self.teller is not None:
            self.teller.stop()


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
