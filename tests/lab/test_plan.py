"""`make plan` on machines that nobody trained on: shaped cables beside iperf3, and who is refused.

Steps are a stand-in's; machines, guards, ssh and links are real.
"""

import json
import re
import uuid

import pytest

from tests.lab import chaos_standin
from tests.lab.chaos_run import CHECKOUT
from tests.lab.iperf import iperf3
from tests.unit.report.report_runs import RunBuilder

NODES = 3  # an odd number: each rests once
# A rank of the trainer that took steps: what it writes, but for its machine's name.
TRIED = """
import json, os, pathlib, sys
asked = json.loads(sys.argv[-1])
assert "trial" in asked and os.environ["WORLD_SIZE"] == "1", sys.argv
host = os.environ["TANDEM_NODE"]
out = pathlib.Path(asked["output"], "nodes", host, "rank0.1.steps.jsonl")
out.write_text({lines!r}.replace("HOST", host))
"""


@pytest.fixture(scope="module")
def cluster(start_lab):
    lab = start_lab("plan", "--nodes", str(NODES), "--rate", "1gbit", "--no-bundle")
    for node in range(1, NODES + 1):
        chaos_standin.install(lab, node)
    return lab


@pytest.fixture
def words(tmp_path):
    """What a plan and a run on these machines are called with, and their mark."""
    mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
    file = chaos_standin.inventory(tmp_path, NODES, mark, step_seconds=0.1)
    return mark, ("--inventory", str(file))


def plan(lab, *words):
    return lab.control("python", "-m", "launcher", "plan", "--measure", *words, check=False)


def measurements():
    return {path.name for path in (CHECKOUT / "runs/measured").glob("*Z-*")}


def test_links_are_what_iperf3_finds(cluster, words, tmp_path):
    built = RunBuilder(tmp_path / "built", nodes=1, steps=6, epochs=1)
    built.write_rank(0, "HOST")
    text = TRIED.format(lines=(tmp_path / "built/nodes/HOST/rank0.1.steps.jsonl").read_text())
    for node in range(1, NODES + 1):
        cluster.ssh(node, "cat > /opt/standin/trainer.py", input=text)
    before = measurements()
    cluster("shape", "100mbit", "3")
    done = plan(cluster, *words[1], "--model", "resnet50")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"(node\d) reaches at most \d+ Mbit/s", done.stdout) == ["node3"]
    (name,) = measurements() - before
    nodes = CHECKOUT / "runs/measured" / name / "nodes"
    told = [json.loads((nodes / f"node{n}/links.json").read_text()) for n in range(1, NODES + 1)]
    theirs = iperf3(cluster)
    pairs = [rates for one in told for rates in one["pairs"].values()]
    assert len(pairs) == NODES and {rates["mtu"] for rates in pairs} == {1500}
    fast = told[0]["pairs"]["node2"]
    assert fast["mbit_to"] == pytest.approx(theirs, rel=0.03)
    assert fast["mbit_from"] == pytest.approx(theirs, rel=0.03)
    # Three machines' traffic takes more than these cores may have to spare.
    assert all(0 < one["ring"]["mbit"] < 1.03 * theirs for one in told)
    said = " ".join(done.stdout.split())
    assert "With the measured links" in said and "docs/slow-networks.md" in said
