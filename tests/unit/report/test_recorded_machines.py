"""Memory pressure, swap and other programs, from files of /proc that were recorded on a machine.

A node of the lab has neither memory nor swap of its own, and sees its host's processors. So the
recorder reads here what was recorded, every two seconds, on a PC with two processors that was busy
with other work: of a process that touched 240 MB and was allowed 80 (`thrashing`) or 200 of them,
one that touched them once and then left them (`put_away`), one that shared a processor with three
programs (`hog`), one among the machine's other work (`busy`) and one that went before it (`quiet`).
Steps are made up: a rank on such a machine is twice as slow, or as fast as the others.
"""

import json
from pathlib import Path

import pytest

from launcher.node import records
from report.analysis import analyse
from tests.unit.report.report_runs import GUARD, START, STRAGGLER, RunBuilder

RECORDED = Path(__file__).parent / "recorded"
# The machines that were so (the others were quiet), whether node3 is slow, and what it is.
TRIALS = [
    ({"node3": "thrashing"}, STRAGGLER, "memory_pressure"),
    ({"node3": "thrashing_a_little"}, STRAGGLER, "memory_pressure"),
    ({"node3": "put_away"}, {}, "compute"),
    ({"node3": "hog"}, STRAGGLER, "cpu_contention"),
    ({"node3": "busy"}, STRAGGLER, "cpu_contention"),
    (dict.fromkeys(("node1", "node2", "node3", "node4"), "busy"), STRAGGLER, "straggler"),
]


def record(path, name, monkeypatch):
    """A machine's file with the lines that the sampler makes of what was recorded."""
    now, samples = {}, json.loads((RECORDED / f"{name}.json").read_text())

    def read_text(path):
        path = Path(path)
        if path.name == "schedstat":
            return now["schedstat"][path.parent.name]
        return now.get(str(path), "")

    with monkeypatch.context() as patch:
        patch.setattr(records, "read_text", read_text)
        patch.setattr(records, "descendants", lambda pid: [])
        patch.setattr(records, "list_threads", lambda pid: [Path(one) for one in now["schedstat"]])
        sampler, file = records.Sampler("eth0", pids=lambda: {0: 4711}), records.RecordFile(path)
        for place, sample in enumerate(samples):
            now.update(sample, mono=GUARD + START + 2 * place)
            file.append(
                {"kind": "sample", "mono": now["mono"], **sampler.processors()}
                | sampler.memory()
                | sampler.ranks()
            )


@pytest.mark.parametrize(("machines", "steps", "cause"), TRIALS)
def test_what_was_recorded_is_told(tmp_path, monkeypatch, machines, steps, cause):
    run = RunBuilder(tmp_path / "run", **steps).write()
    for node in range(1, 5):
        path = run / f"nodes/node{node}/machine.1.jsonl"
        path.unlink()
        record(path, machines.get(f"node{node}", "quiet"), monkeypatch)
    assert analyse(run).summary["bottleneck"] == cause
