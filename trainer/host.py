"""What the operating system knows about this process."""

import os
import pathlib
import resource
import time


def process_start() -> float:
    """When this process, or the guard that started it, began, on CLOCK_MONOTONIC (seconds)."""
    if "TANDEM_GUARD_MONO" in os.environ:
        return float(os.environ["TANDEM_GUARD_MONO"])
    try:
        # After the name in parentheses, which may hold spaces, starttime is the 20th field.
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except OSError:
        age = time.process_time()
    return time.monotonic() - age


def peak_resident() -> int:
    """Largest resident set of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
