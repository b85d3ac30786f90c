"""The batch script of `make slurm` on a real Slurm of Debian's packages: two nodes, two epochs."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from lab import base
from lab.plan import System
from tests.lab.site_plays import play, write_inventory

CHECKOUT = Path(__file__).resolve().parents[2]
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
    """slurm-wlm and what it needs beside the machines' base, fetched on the host."""
    folder = tmp_path_factory.mktemp("debs")
    (folder / "partial").mkdir()
    options = [
        f"Dir::State::status={base.folder(System())}/var/lib/dpkg/status",
        f"Dir::Cache::archives={folder}",
    ]
    argv = ["apt-get", "install", "--download-only", "--yes", "--no-install-recommends"]
    argv += [word for option in options for word in ("-o", option)]
    subprocess.run([*argv, "slurm-wlm"], check=True, stdout=subprocess.DEVNULL)
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
            " sudo systemctl restart munge",
        )
    lab.ssh(1, "sudo systemctl restart slurmctld")
    for node in NODES:
        lab.ssh(node, "sudo systemctl restart slurmd")
    return lab, inventory


def test_a_batch_job_trains_on_two_nodes(cluster, tmp_path):
    lab, inventory = cluster
    said = lab.control(
        *("python", "-m", "launcher", "slurm", "--nodes", "2", "--epochs", "2"),
        *("--inventory", inventory),
    ).stdout
    script = CHECKOUT / said.split()[-1]
    try:
        for node in NODES:
            sent = [
                "trainer",
                "tandem",
                "contract",
                "examples",
                "launcher",
                str(script.relative_to(CHECKOUT)),
            ]
            copy(lab, node, CHECKOUT, sent, "job")
        wait = f"cd job && sbatch --wait {script.relative_to(CHECKOUT)}"
        done = lab("ssh", "1", "--", wait, check=False)
        log = lab.ssh(1, "cat job/tandem-*.log")
        assert done.returncode == 0, done.stdout + done.stderr + log
    finally:
        script.unlink()
    assert "127.0.1.1" not in log
    for node in NODES:
        text = lab.ssh(node, f"cat job/runs/{script.stem}/nodes/node{node}/rank*.steps.jsonl")
        lines = [json.loads(line) for line in text.splitlines()]
        assert (lines[0]["kind"], lines[0]["world_size"]) == ("start", 2)
        assert (lines[-1]["kind"], lines[-1]["status"]) == ("end", "finished")
        evaluated = [line for line in lines if line["kind"] == "evaluate"]
        assert [line["epoch"] for line in evaluated] == [0, 1]
        assert evaluated[-1]["samples"] == lines[0]["eval_images"]
