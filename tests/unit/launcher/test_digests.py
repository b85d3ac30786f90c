"""Digests on their way from guards into the run's folder, by the real channel."""

import json

import pytest

from contract import digests
from launcher.background import Spool
from launcher.watch import digests as watching
from launcher.watch.digests import MOST, NEWEST, Kept, thinned
from tests.unit.launcher.scripted_guards import watch

pytestmark = pytest.mark.usefixtures("settles_soon")
GOOD = "for line in sys.stdin:\n    if 'kill' in line: end('killed'); break\n"
# What a guard of the rank `own` says of a step.
DIGEST = """
own = task["ranks"][0]
def row(step, **more):
    usual = dict(rank=own, phase="steady", step=step, epoch=0, steps=1, samples=8)
    usual.update(spent=[100, 0, 3000, 5000, 1000, 0, 0, 0, 0], waits=[1000 + 500 * own])
    return dict(usual, **more)
def digest(*rows, run=task["run"], machine={"cpu": 50.0}, **more):
    say(type="digest", run=run, ranks=list(rows), machine=machine, mono=time.monotonic(), **more)
"""


def told(tmp_path, host="node1"):
    path = tmp_path / "nodes" / host / digests.NAME
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_digests_are_summed_up_and_kept(tmp_path):
    start = (
        "line = json.dumps(dict(kind='start', attempt=1, model='m')).encode()\n"
        "say(type='begun', rank=own, run=task['run'], bytes=len(line))\n"
        "sys.stdout.buffer.write(line); sys.stdout.buffer.flush()\n"
    )
    says = DIGEST + start + "for step in (1, 2, 3): digest(row(step, loss=0.5))\nend('finished')"
    outcome, _ = watch(tmp_path, [says, says])
    assert outcome.status == "finished"
    for number, host in enumerate(("node1", "node2")):
        begun, *lines = told(tmp_path, host)
        assert (begun["rank"], begun["start"]["model"]) == (number, "m")
        last = digests.checked(lines[-1])
        rank = last["ranks"][str(number)]
        assert (rank["step"], rank["samples"], rank["loss"]) == (3, 24, 0.5)
        assert rank["steady"]["steps"] == 3
        assert rank["steady"]["seconds"]["backward"] == pytest.approx(1.5)
        # Of each step the least wait among the ranks: those of rank 0.
        assert last["least"]["steady"] == [3, pytest.approx(0.3)]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("digest(row(1), machine={'cpu': float('nan')})", "digest frame.machine.cpu"),
        ("digest(row(1, loss=float('nan')))", "digest frame.ranks[0].loss"),
        ("digest(row(1, spent=[-1]))", "digest frame.ranks[0].spent[0]"),
        ("digest(row(1), run='another')", "digest frame.run is not"),
        ("digest(row(1, rank=7))", "digest frame.ranks[0].rank is not"),
        ("digest(row(1, waits=[1] * 100000))", "a digest of 300"),
        ("digest(row(1), more='x' * (1 << 20))", "a digest of 1048"),
        ("digest(*[row(1)] * 10)", "of which 500 are allowed"),
        ("say(type='begun', rank=own, run='another', bytes=3)", "begun frame.run is not"),
        ("say(type='begun', rank=own, run=task['run'], bytes=1 << 20)", "begun frame.bytes"),
        ("say(type='begun', rank=own, run=task['run'], bytes=3)\nprint('abc')", "it is no JSON"),
        (
            "say(type='begun', rank=own, run=task['run'], bytes=40)\n"
            "print(json.dumps(dict(kind='start', attempt=7)).ljust(40))",
            "a start line of attempt 7",
        ),
    ],
    ids=lambda text: text[:40],
)
def test_a_digest_that_no_guard_sends_is_its_nodes_failure(tmp_path, lie, why):
    outcome, _ = watch(tmp_path, [GOOD, DIGEST + lie + "\nsys.stdin.read()"])
    assert outcome.status == "failed"
    assert (outcome.cause.host, outcome.cause.source) == ("node2", "guard")
    assert why in outcome.cause.message


def test_a_thousand_digests_a_second_are_a_line_a_second(tmp_path):
    says = DIGEST + "for step in range(3000): digest(row(step + 1))\nend('finished')"
    outcome, _ = watch(tmp_path, [says])
    assert outcome.status == "finished"
    lines = told(tmp_path)
    assert 1 <= len(lines) <= outcome.wall_seconds + 2
    assert lines[-1]["ranks"]["0"]["steady"]["steps"] == 3000


def test_a_guard_that_sends_none_is_no_fault(tmp_path):
    outcome, _ = watch(tmp_path, ["end('finished')"])
    assert outcome.status == "finished"
    assert not list(tmp_path.rglob(digests.NAME))


def line(at, **more):
    return {"attempt": 1, "unix": float(at), **more}


def test_a_long_runs_file_stays_small(tmp_path):
    spool = Spool()
    file = Kept(tmp_path / digests.NAME, spool)
    file.add({"attempt": 1, "rank": 0, "start": {}, "unix": 0.0})
    for unix in range(4 * MOST):
        file.add(line(unix, **({"evaluated": [1]} if unix == 7 else {})))
    spool.drain()
    kept = [one for _, one in digests.read(tmp_path / digests.NAME)]
    assert len(kept) <= MOST
    assert "start" in kept[0] and any("evaluated" in one for one in kept)
    times = [one["unix"] for one in kept[1:]]
    assert times == sorted(times) and times[-1] == 4 * MOST - 1
    # The newest are whole; of the rest none is far from the next.
    assert times[-NEWEST:] == [float(unix) for unix in range(3 * MOST + MOST - NEWEST, 4 * MOST)]
    assert max(later - one for one, later in zip(times, times[1:])) < 4 * MOST / 200


def test_lines_of_odd_times_do_not_keep_a_file_from_being_thinned():
    odd = [line(0, unix="x"), line(0, unix=None), {}, *(line(1) for _ in range(MOST))]
    assert len(thinned(odd)) <= NEWEST + 2 * watching.OLDER


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    spool = Spool()
    file = Kept(tmp_path / "file" / digests.NAME, spool)
    file.add(line(1))
    assert spool.drain(5.0)
