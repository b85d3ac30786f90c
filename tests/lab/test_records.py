"""Records on their way while something breaks: each one is here once and in order, byte for byte
the file on its machine, and what ends by itself does so in the seconds that docs/launcher.md
promises. The trainer is a stand-in; machines, ssh, cables and disks are real.
"""

import json
import time

import pytest

from tests.lab import chaos_trial
from tests.lab.chaos_run import ended
from tests.lab.chaos_trial import CUT, GONE, ORPHANS
from tests.lab.control_machine import fill

NODES, STEPS = 2, 13  # machines; steps of 0.1 s an epoch


@pytest.fixture(scope="module", autouse=True)
def figures(request):
    yield
    chaos_trial.print_figures(request.config)


def trains(run):
    run.wait_for(r"\] step 20\n", NODES)
    return run


def there(run, node):
    """The records of a machine as they lie there, by name."""
    (folder,) = run.fetch([node], run.files)
    return {path.name: path.read_bytes() for path in folder.glob("nodes/*/*.jsonl")}


def here(run, node):
    folder = run.folder / f"nodes/node{node}"
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


def behind(run, node):
    """Bytes of its rank's steps that are not here yet."""
    name = f"rank{node - 1}.1.steps.jsonl"
    return len(there(run, node)[name]) - len(here(run, node)[name])


def assert_whole(run, epochs, attempts):
    """It has ended well; of all attempts each record is here, and each step once and in order."""
    assert run.end() == 0, run.said()
    assert len(run.attempts()) == attempts
    for node in range(1, NODES + 1):
        copies = here(run, node)
        assert copies == there(run, node)
        rank, numbers = node - 1, range(1, attempts + 1)
        assert sorted(copies) == sorted(
            [f"machine.{n}.jsonl" for n in numbers]
            + [f"rank{rank}.{n}.steps.jsonl" for n in numbers]
        )
        for attempt in numbers:
            steps = steps_of(copies[f"rank{rank}.{attempt}.steps.jsonl"])
            assert len(steps) > 19 and steps == [*range(steps[0], steps[-1] + 1)]
        assert steps[-1] == epochs * STEPS
        samples = [json.loads(line) for line in copies[f"machine.{attempts}.jsonl"].splitlines()]
        times = [line["mono"] for line in samples[:-1]]
        assert times == sorted(set(times)) and samples[-1]["kind"] == "exit"


def steps_of(data):
    """The numbers of its whole lines of steps."""
    whole = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    return [line["step"] for line in whole if line["kind"] == "step"]


def assert_over(run, what, since, bounds):
    """Each machine's part of the first attempt had ended by itself, in so many seconds."""
    limit = time.monotonic() + ORPHANS
    while run.processes() and time.monotonic() < limit:
        time.sleep(0.05)
    assert run.processes() == []
    ends = ended(run.fetch([1, 2], run.files), attempt=1)
    figures = [
        (f"{what}: node{node}", round(ends[f"node{node}"] - since, 2), bound)
        for node, bound in zip((1, 2), bounds)
    ]
    chaos_trial.FIGURES += figures
    assert all(seconds <= bound for _, seconds, bound in figures), figures


def test_a_cable_is_cut_for_40_seconds(start, machines):
    """Which ends its machine's lease."""
    run = trains(start(6))
    cut_at = time.monotonic()
    machines("cut", "2")
    assert run.end() == 1, run.said()
    time.sleep(max(0.0, cut_at + 40 - time.monotonic()))
    machines("mend", "2")
    assert_over(run, "cut", cut_at, (GONE, CUT))
    assert here(run, 2) != there(run, 2)
    run.start("--resume", run.name)
    assert_whole(run, 6, attempts=2)


def test_the_disk_here_is_full_for_a_while(start, small_disk):
    """What has come of a file until then may end in a page that still has room."""
    run = trains(start(25, disk=small_disk(1200)))
    full = fill(run.disk)
    while behind(run, 1) < 8192:
        assert run.process.poll() is None, run.said()
    full.unlink()
    assert_whole(run, 25, attempts=1)
