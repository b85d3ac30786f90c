"""The batch script of `make slurm` on a real Slurm of Debian's packages: two nodes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from lab import base
from lab.plan import System
from tests.lab.site_plays import play, write_inventory

CHECKOUT = Path(__file__).resolve().parents[2]
PYTHON = CHECKOUT / ".venv/bin/python"
NODES = (1, 2)
CONF = """\
ClusterName=lab
SlurmctldHost=node1(192.168.56.111)
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
NodeName=node1 NodeAddr=192.168.56.111 CPUs={cpus}
NodeName=node2 NodeAddr=192.168.56.112 CPUs={cpus}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """slurm-wlm, what the launcher imports, and what these need beside the machines' base, fetched
    on the host."""
    folder = tmp_path_factory.mktemp("debs")
    (folder / "partial").mkdir()
    options = [
        f"Dir::State::status={base.folder(System())}/var/lib/dpkg/status",
        f"Dir::Cache::archives={folder}",
    ]
    argv = ["apt-get", "install", "--download-only", "--yes", "--no-install-recommends"]
    argv += [word for option in options for word in ("-o", option)]
    packages = ("slurm-wlm", "python3-yaml", "python3-jinja2")
    subprocess.run([*argv, *packages], check=True, stdout=subprocess.DEVNULL)
    return folder


def copy(lab, node, folder, names, target):
    """Files of the host into a folder of a node's run user."""
    tar = subprocess.Popen(
        ["tar", "-cf", "-", "--exclude=__pycache__", *names], cwd=folder, stdout=subprocess.PIPE
    )
    unpack = f"mkdir -p {target} && tar -xf - -C {target}"
    lab.control("ssh", f"tandem@192.168.56.{110 + node}", unpack, stdin=tar.stdout)
    assert tar.wait() == 0


@pytest.fixture(scope="module")
def cluster(start_lab, packages, tmp_path_factory):
    """Two provisioned machines with Slurm; (lab, inventory)."""
    lab = start_lab("slurm", "--nodes", "2", "--rate", "1gbit")
    folder = tmp_path_factory.mktemp("inventory")
    addresses = {f"node{i}": f"ansible_host=192.168.56.{110 + i}" for i in NODES}
    inventory = write_inventory(folder, addresses)
    play(lab, "-i", inventory, "site.yml", "--skip-tags", "firewall")
    key = os.urandom(64).hex()
    conf = CONF.format(cpus=os.cpu_count())
    for node in NODES:
        copy(lab, node, packages, [path.name for path in packages.glob("*.deb")], "debs")
        lab.ssh(
            node,
            "set -e; sudo DEBIAN_FRONTEND=noninteractive dpkg -i debs/*.deb >/dev/null 2>&1;"
            f" printf %s {key} | sudo tee /etc/munge/munge.key >/dev/null;"
            f" printf %s '{conf}' | sudo tee /etc/slurm/slurm.conf >/dev/null;"
            # The machines see the host's mixture of control groups, which Slurm does not detect.
            " echo CgroupPlugin=cgroup/v1 | sudo tee /etc/slurm/cgroup.conf >/dev/null;"
            " sudo install -d -o slurm /var/lib/slurm/slurmctld /var/lib/slurm/slurmd;"
            " sudo systemctl restart munge;"
            # The environment of `make env` under the same path, as a shared checkout has it.
            f" sudo mkdir -p {PYTHON.parent} && sudo ln -sf /usr/bin/python3 {PYTHON}",
        )
    lab.ssh(1, "sudo systemctl restart slurmctld")
    for node in NODES:
        lab.ssh(node, "sudo systemctl restart slurmd")
    return lab, inventory


@pytest.fixture
def submit(cluster):
    """submit(*words of make slurm) -> the run's name, and a function that submits its script."""
    lab, inventory = cluster
    scripts = []

    def write(*words):
        said = lab.control("python", "-m", "launcher", "slurm", *words, "--inventory", inventory)
        script = CHECKOUT / said.stdout.split()[-1]
        scripts.append(script)
        rooms = ["trainer", "tandem", "contract", "examples", "recipes", "launcher", "report"]
        for node in NODES:
            copy(lab, node, CHECKOUT, [*rooms, str(script.relative_to(CHECKOUT))], "job")

        def sbatch(*options, **given):
            line = f"cd job && sbatch {' '.join(options)} {script.relative_to(CHECKOUT)}"
            return lab("ssh", "1", "--", line, check=False, **given)

        return script.stem, sbatch

    yield write
    for script in scripts:
        script.unlink()


def records(lab, run, node):
    """The lines of a machine's ranks, as they came to the first one."""
    text = lab.ssh(1, f"cat job/runs/{run}/nodes/node{node}/rank*.steps.jsonl")
    return [json.loads(line) for line in text.splitlines()]


def test_a_batch_job_trains_on_two_nodes(cluster, submit):
    lab, _ = cluster
    run, sbatch = submit("--nodes", "2", "--epochs", "2")
    done = sbatch("--wait")
    log = lab.ssh(1, "cat job/tandem-*.log")
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert "127.0.1.1" not in log
    for node in NODES:
        lines = records(lab, run, node)
        assert (lines[0]["kind"], lines[0]["world_size"]) == ("start", 2)
        assert (lines[-1]["kind"], lines[-1]["status"]) == ("end", "finished")
        evaluated = [line for line in lines if line["kind"] == "evaluate"]
        assert [line["epoch"] for line in evaluated] == [0, 1]
        assert evaluated[-1]["samples"] == lines[0]["eval_images"]
    summary = json.loads(lab.ssh(1, f"cat job/runs/{run}/summary.json"))
    assert (summary["status"], summary["nodes"], summary["epochs"]) == ("finished", 2, 2)
    hello = lab.ssh(1, f'grep -c \'"kind":"sample"\' job/runs/{run}/nodes/node2/machine.1.jsonl')
    assert int(hello) > 1  # a guard recorded the other machine


def test_a_job_at_its_time_limit_saves_and_its_script_goes_on(cluster, submit):
    lab, _ = cluster
    run, sbatch = submit("--nodes", "2", "--epochs", "12")
    job = sbatch("--parsable").stdout.strip()
    steps = f"job/runs/{run}/nodes/node2/rank1.1.steps.jsonl"
    lab.ssh(1, f'until grep -q \'"kind": *"evaluate"\' {steps}; do sleep 1; done', timeout=300)
    lab.ssh(1, f"scancel --batch --signal=TERM {job}")  # as --signal=B:TERM@120 does
    lab.ssh(1, f"while squeue -h -j {job} 2>/dev/null | grep -q .; do sleep 1; done", timeout=120)
    assert json.loads(lab.ssh(1, f"cat job/runs/{run}/summary.json"))["status"] == "stopped"
    done = sbatch("--wait")
    assert done.returncode == 0, done.stdout + done.stderr + lab.ssh(1, "cat job/tandem-*.log")
    summary = json.loads(lab.ssh(1, f"cat job/runs/{run}/summary.json"))
    assert (summary["status"], len(summary["attempts"])) == ("finished", 2)
    assert summary["attempts"][1]["resumed_samples"] > 0
