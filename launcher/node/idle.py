"""How long the ranks of this node have done nothing, as when they wait for what never comes."""

from launcher.node.processes import PROC
from launcher.node.sockets import connections, sockets_of

LOOK_EVERY = 5.0  # seconds
CPU_SHARE = 0.02  # of a processor, by a rank: tandem.timings takes 0.3 % while nothing happens


class Idleness:
    """Looks at what the kernel counts for the ranks that `sampler` samples. `since` is None while
    that is not known."""

    def __init__(self, sampler):
        self.sampler, self.since = sampler, None
        self.looked, self.ran, self.moved = 0.0, 0.0, None  # at the last look

    def seconds(self, now):
        """How long no rank has used a processor or a GPU, or read, written or sent anything; None
        if the kernel does not say."""
        if now - self.looked >= LOOK_EVERY:
            ranks = self.sampler.schedules.values()
            ran = sum(rank.ran for rank in ranks)
            is_busy = ran - self.ran > CPU_SHARE * len(ranks) * (now - self.looked)
            is_busy |= self.sampler.gpu_used >= self.looked
            try:
                # Nothing has to be counted of those who compute.
                moved = None if is_busy else bytes_moved(ranks)
                is_active = is_busy or moved != self.moved or self.since is None
                self.since, self.moved = now if is_active else self.since, moved
            except (OSError, ValueError):
                self.since = None
            self.looked, self.ran = now, ran
        return None if self.since is None else now - self.since


def bytes_moved(ranks):
    """What the processes of these ranks have read and written, and what came and went by their
    connections. Raises OSError or ValueError."""
    links = {link for rank in ranks for link in sockets_of(rank.pid)}
    ours = [connection for connection in connections() if connection.link in links]
    total = sum((each.sent or 0) + (each.received or 0) for each in ours)
    for pid in (pid for rank in ranks for pid in rank.pids):
        try:
            counted = (PROC / str(pid) / "io").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        total += sum(int(line[7:]) for line in counted if line.startswith(("rchar", "wchar")))
    return total
