"""What a guard tells once a second of its ranks' steps, read from the lines that they write for the
report (docs/run-directory.md), and of its machine. Costs the ranks nothing."""

import contextlib
import json
import os

# The order of the times in a digest: those of contract/digests.py, which is not sent to a machine.
CATEGORIES = (
    "data",
    "h2d",
    "forward",
    "backward",
    "sync_exposed",
    "optimizer",
    "evaluate",
    "checkpoint",
    "other",
)
TICK = 1e-4  # seconds: the unit of all times in a digest
LARGEST = 500  # bytes of a digest for each rank
HEAD = 80  # of them for type, seq and mono
WAITS = (
    40  # waits of single steps in a digest, where there is room; of more steps, of several together
)
STEPS = 1000  # of a rank in a digest; the others wait for the next
CHUNK = 1 << 18  # bytes of a file that are read at once: more than a thousand steps
LINE = 1 << 16  # bytes; a longer line is left out
LEVELS = 16  # of lists and mappings within each other in a start line
EVALUATED = ("epoch", "top1", "top5", "loss", "train_loss")


def ticks(seconds):
    """Seconds in ticks; 0 for what is no time."""
    return round(seconds / TICK) if number(seconds) and 0 < seconds < 1e9 else 0


def number(value):
    """Whether a value is a number that JSON has."""
    # An integer of hundreds of digits is none either, and isfinite would raise for it.
    return isinstance(value, (int, float)) and abs(value) < 1e300


class Times:
    """Sums of the times of lines, by category, in ticks."""

    def __init__(self):
        self.sums = dict.fromkeys(CATEGORIES, 0.0)

    def add(self, seconds):
        for name in CATEGORIES:
            value = seconds.get(name)
            if number(value):
                self.sums[name] += value

    def ticks(self):
        """In the order of CATEGORIES; an empty list where there is none."""
        found = [ticks(self.sums[name]) for name in CATEGORIES]
        return found if any(found) else []


class RankDigest:
    """One rank's lines since the last digest. `begun` is its start line, until it is taken."""

    def __init__(self, path, rank, attempt):
        self.path, self.rank, self.attempt = path, rank, attempt
        self.begun = None
        # What earlier attempts wrote is skipped.
        self.offset = path.stat().st_size if path.exists() else 0
        self.partial, self.skipping = b"", False
        self.waiting = []  # steps of the next phase: a digest has those of one
        self.seen = 0  # steps so far
        self.clear()

    def clear(self):
        self.phase, self.last, self.waits, self.samples = None, None, [], 0
        self.spent, self.beside = Times(), Times()
        self.loss = self.top1 = self.evaluated = None

    def read(self):
        """The whole lines that were written since, of at most CHUNK bytes. Raises OSError."""
        # What is no file there must not hold up the guard.
        descriptor = os.open(str(self.path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            data = os.pread(descriptor, CHUNK, self.offset)
        finally:
            os.close(descriptor)
        self.offset += len(data)
        whole, end, rest = (self.partial + data).rpartition(b"\n")
        self.partial = rest
        lines = whole.split(b"\n") if end else []
        if self.skipping and end:
            lines, self.skipping = lines[1:], False
        if len(self.partial) > LINE:
            self.partial, self.skipping = b"", True
        return lines

    def take(self):
        """This rank's row of a digest; None where it did nothing since the last."""
        lines, self.waiting = self.waiting, []
        if len(lines) < 1000:
            # Not there yet, or the disk fails, which its rank says.
            with contextlib.suppress(OSError):
                lines += [line for line in map(parse, self.read()) if line is not None]
        for place, line in enumerate(lines):
            if not self.add(line):
                self.waiting = lines[place:]
                break
        row = self.row()
        self.clear()
        return row

    def add(self, line):
        """Whether a line could be added: a step of another phase waits for the next digest."""
        kind, seconds = line.get("kind"), line.get("seconds")
        if line.get("attempt") != self.attempt:
            return True
        if kind == "start":
            if shallow(line):
                self.begun = json.dumps(line).encode()
            return True
        seconds = seconds if isinstance(seconds, dict) else {}
        if kind == "step":
            return self.add_step(line, seconds)
        self.beside.add(seconds)
        if kind == "evaluate":
            found = {name: line.get(name) for name in EVALUATED}
            self.evaluated = {name: rounded(one) for name, one in found.items() if number(one)}
        return True

    def add_step(self, line, seconds):
        exact = "exact" if line.get("exact") is True else "steady"
        phase = exact if self.seen else "first"
        if self.phase not in (None, phase) or len(self.waits) == STEPS:
            return False
        step, epoch, samples = (line.get(name) for name in ("step", "epoch", "samples"))
        if not all(type(one) is int and 0 <= one < 1 << 48 for one in (step, epoch, samples)):
            return True
        self.phase, self.last, self.seen = phase, (step, epoch), self.seen + 1
        self.samples += samples
        self.spent.add(seconds)
        self.waits.append(ticks(seconds.get("sync_exposed")))
        for name in ("loss", "top1"):
            if number(line.get(name)):
                setattr(self, name, rounded(line[name]))
        return True

    def row(self):
        row = {"rank": self.rank}
        if self.last is not None:
            step, epoch = self.last
            row.update(phase=self.phase, step=step, epoch=epoch, steps=len(self.waits))
            row.update(samples=self.samples, spent=self.spent.ticks(), waits=grouped(self.waits))
        for name in ("loss", "top1", "evaluated"):
            if getattr(self, name) is not None:
                row[name] = getattr(self, name)
        beside = self.beside.ticks()
        if beside:
            row["beside"] = beside
        return row if len(row) > 1 else None


def rounded(value):
    return float("{:.5g}".format(value))


def grouped(waits, most=WAITS):
    """The waits, where there are more than so many the mean of each few steps that follow each
    other; the last of these may be fewer."""
    size = -(-len(waits) // most) or 1
    parts = [waits[at : at + size] for at in range(0, len(waits), size)]
    return [round(sum(part) / len(part)) for part in parts]


def parse(line):
    """A line as a JSON object, or None."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def shallow(value, levels=LEVELS):
    """Whether no more levels lie in a value; a deep one can be read, but not be written again."""
    if not isinstance(value, (list, dict)):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(shallow(part, levels - 1) for part in parts)


class Digest:
    """What is told of all ranks of this machine, and of the machine by `vitals`."""

    def __init__(self, task, folder, vitals):
        self.run, self.vitals = task.run, vitals
        name = "rank{}.steps.jsonl"
        self.ranks = [
            RankDigest(folder / name.format(rank), rank, task.attempt) for rank in task.ranks
        ]

    def send(self, frames):
        """The start lines that are new, then a digest of at most LARGEST bytes a rank, for a larger
        one counts as a liar's. What came beside the steps has one of its own where there is no room
        for both."""
        rows = [row for row in (one.take() for one in self.ranks) if row is not None]
        for one in self.ranks:
            if one.begun is not None:
                size = self.vitals.size()
                frames.send("begun", one.begun, rank=one.rank, run=self.run, **size)
                one.begun = None
        most = LARGEST * len(self.ranks) - HEAD
        told = {"run": self.run, "ranks": rows, "machine": self.vitals.read()}
        if size_of(told) > most and any("evaluated" in row for row in rows):
            parts = [apart(row) for row in rows]
            frames.send("digest", run=self.run, ranks=[p for p in parts if len(p) > 1], machine={})
            told["ranks"] = [row for row in rows if len(row) > 1]
        shorten(told, most)
        frames.send("digest", **told)


def size_of(told):
    """Bytes of a digest, but for its head."""
    return len(json.dumps(told, separators=(",", ":")))


def apart(row):
    """What came beside the steps, taken out of a row, as a row of its own."""
    found = {name: row.pop(name) for name in ("evaluated", "beside") if name in row}
    return dict(found, rank=row["rank"])


def shorten(told, most):
    """Leave out what there is no room for: waits of single steps first, then figures of GPUs, then
    all of the machine."""
    limit = WAITS
    while size_of(told) > most and limit > 1:
        limit //= 2
        for row in told["ranks"]:
            if row.get("waits"):
                row["waits"] = grouped_again(row["waits"], row["steps"], limit)
    gpus = told["machine"].get("gpus")
    while gpus and size_of(told) > most:
        gpus.pop()
    if size_of(told) > most:
        told["machine"] = {}


def grouped_again(waits, steps, most):
    """Waits that may be of several steps each, in fewer groups."""
    each = -(-steps // len(waits))
    every = [wait for wait in waits for _ in range(each)][:steps]
    return grouped(every, most)
