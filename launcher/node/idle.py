"""Measures for how long the ranks of this node have done nothing, for the guard's beats."""

from launcher.node.processes import PROC
from launcher.node.sockets import connections, sockets_of

LOOK_EVERY = 5.0  # seconds between two looks
CPU_SHARE = 0.02  # of a processor, by a rank: tandem.timings takes 0.3 % while nothing happens


class Idleness:
    """Compares the kernel's counters of the ranks with those of the last look. `sampler`: of
    records.py. `idle_since`: a monotonic time, None if unknown."""

    def __init__(self, sampler):
        self.sampler, self.idle_since = sampler, None
        # The time and the counters at the last look.
        self.look_time, self.ran_seconds, self.moved_bytes = 0.0, 0.0, None

    def seconds(self, time_now):
        """Return for how long no rank has used a processor or a GPU, or read, written or sent
        anything; None if the kernel does not say. `time_now` is a monotonic time in seconds."""
        if time_now - self.look_time >= LOOK_EVERY:
            ranks = self.sampler.cpu_times.values()
            ran = sum(rank.ran for rank in ranks)
            passed = time_now - self.look_time
            is_busy = ran - self.ran_seconds > CPU_SHARE * len(ranks) * passed
            is_busy |= self.sampler.gpu_busy_time >= self.look_time
            try:
                # The count of bytes takes time, so it is omitted while a rank computes.
                moved = None if is_busy else count_moved_bytes(ranks)
                is_active = is_busy or moved != self.moved_bytes or self.idle_since is None
                if is_active:
                    self.idle_since = time_now
                self.moved_bytes = moved
            except (OSError, ValueError):
                self.idle_since = None
            self.look_time, self.ran_seconds = time_now, ran
        return None if self.idle_since is None else time_now - self.idle_since


def count_moved_bytes(ranks):
    """Return the bytes that the processes of these ranks have read and written, and sent and
    received by TCP. Raises OSError or ValueError."""
    links = {link for rank in ranks for link in sockets_of(rank.pid)}
    total = 0
    for connection in connections():
        if connection.link in links:
            total += (connection.sent or 0) + (connection.received or 0)
    for pid in (pid for rank in ranks for pid in rank.pids):
        try:
            lines = (PROC / str(pid) / "io").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
        # `rchar: 4711` and `wchar: 12` are bytes; the lines that follow are not needed.
        total += sum(int(line[7:]) for line in lines if line.startswith(("rchar", "wchar")))
    return total
