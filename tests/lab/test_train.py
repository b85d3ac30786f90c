"""Training over ssh on machines that site.yml made: any number of nodes, the same on all ranks."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.run_directory import problems

CHECKOUT = Path(__file__).resolve().parents[2]
LAUNCH = ("python", "-m", "launcher")
# What is equal on all ranks: every tensor of the model, its names, types and bytes.
DIGEST = """
import hashlib, sys, torch
state = torch.load(sys.argv[1], map_location="cpu", weights_only=True)["model"]
total = hashlib.sha256()
for name, value in sorted(state.items()):
    total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    total.update(value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else
                 str(value.item()).encode())
print(len(state), total.hexdigest())
"""


def launch(lab, verb, *words, check=True):
    return lab.control(*LAUNCH, verb, *words, check=check)


def run_folder(done) -> Path:
    name = re.search(r"^tandem: run (\S+), attempt", done.stdout, re.M).group(1)
    return CHECKOUT / "runs" / name


def runs() -> set[str]:
    """Those of this file's model: tests of other files, in another process, begin some too."""
    return {path.name for path in (CHECKOUT / "runs").glob("*Z-small_cnn-*")}


@pytest.mark.parametrize("nodes", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 1))])
def test_all_ranks_end_with_the_same_parameters_and_buffers(provisioned, nodes):
    done = launch(provisioned, "train", "--nodes", str(nodes), "--epochs", "1")
    folder = run_folder(done)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["nodes"], summary["world_size"]) == (
        "finished",
        nodes,
        nodes,
    )
    assert summary["first_cause"] is None and summary["steps"] > 0
    digests = set()
    for node in range(1, nodes + 1):
        kept = folder / "nodes" / f"node{node}"
        lines = [json.loads(line) for line in (kept / "machine.1.jsonl").read_text().splitlines()]
        assert lines[0]["card"]["tx_bytes"] and "disks" in lines[0]
        assert (lines[-1]["kind"], lines[-1]["exit_code"]) == ("exit", 0)
        held = f"tandem/runs/{folder.name}/checkpoints/node{node}"
        last = provisioned.member(node, f"ls {held} | grep step- | tail -1").strip()
        program = shlex.quote(DIGEST)
        digests.add(
            provisioned.member(node, f"/opt/tandem/env/bin/python -c {program} {held}/{last}")
        )
        assert provisioned.member(node, "pgrep -fc '[t]orch.distributed.launch' || true") == "0\n"
    assert len(digests) == 1, digests
    assert sorted(path.suffix for path in (folder / "checkpoints").rglob("*.pt")) == [".pt", ".pt"]


def test_a_plan_measures_with_the_real_trainer_and_leaves_nothing_but_figures(provisioned):
    words = ("--nodes", "2", "--model", "examples.small_cnn:small_cnn", "--batch", "24")
    before = runs()
    done = launch(provisioned, "plan", *words, "--measure", "--", "--image_size", "32")
    told = " ".join(done.stdout.split())
    assert "on node1, node2 by themselves, with noise instead of images: a step took" in told
    assert re.search(r"Links: the slowest link reaches \d+ Mbit/s, and \d+ Mbit/s while all", told)
    assert "docs/slow-networks.md" in told
    plan = [line for line in done.stdout.splitlines() if not line.startswith("tandem: ")]
    assert max(map(len, plan)) <= 80
    assert runs() == before
    folder = max((CHECKOUT / "runs/measured").glob("*-small_cnn-2n"))
    assert problems(folder) == []
    for node in (1, 2):
        assert provisioned.member(node, "pgrep -fc '[t]orch.distributed.launch' || true") == "0\n"
        held = provisioned.member(node, f"find tandem/runs/{folder.name} -name '*.pt'")
        assert held == ""
    again = launch(provisioned, "plan", *words, "--", "--image_size", "32").stdout
    assert "tandem: measuring" not in again and "Measured at" in again


def test_an_unreachable_machine_is_named_and_nothing_begins(provisioned):
    before = runs()
    done = launch(provisioned, "train", "--nodes", "5", check=False)
    assert done.returncode == 2
    assert "tandem: node5 (tandem@192.168.56.115, port 22): cannot be reached: " in done.stderr
    assert "Traceback" not in done.stderr
    assert runs() == before


def test_an_unknown_host_key_is_refused(provisioned, tmp_path):
    """The user's key is good, but nobody has confirmed the machines' keys."""
    # Like ssh, the launcher looks where passwd says that the home is, whatever HOME says.
    copy = f"cp ~/.ssh/id_* {tmp_path} && mount --bind {tmp_path} ~/.ssh"
    line = f"{copy} && python -m launcher dry-run --nodes 1"
    done = provisioned.control("sh", "-c", line, check=False)
    assert done.returncode == 2
    assert "node1" in done.stderr and "its host key is unknown" in done.stderr
    assert "make bootstrap" in done.stderr


def test_missing_data_and_missing_python_are_told_by_machine(provisioned, tmp_path):
    done = launch(provisioned, "train", "--nodes", "2", "--data", "nothing", check=False)
    assert done.returncode == 2
    both = ", ".join(f"node{node} (192.168.56.11{node})" for node in (1, 2))
    assert f"{both}: the data folder /srv/tandem/data/nothing is missing" in done.stderr
    inventory = tmp_path / "inventory.ini"
    inventory.write_text(
        "[cluster]\nnode1 ansible_host=192.168.56.111 ansible_user=tandem env_python=/none/python\n"
    )
    done = launch(provisioned, "train", "--inventory", str(inventory), check=False)
    assert done.returncode == 2
    assert "node1 (192.168.56.111): there is no Python at /none/python" in done.stderr
