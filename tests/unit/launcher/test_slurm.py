"""The batch script for Slurm, carried out with stand-ins for Slurm's and the system's tools."""

import importlib.metadata
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace

import pytest

from contract.errors import UserError
from contract.options import Config
from launcher import slurm
from launcher.machines.engine import Host
from launcher.options import config_of
from launcher.plan import models
from tests.unit.launcher.launcher_values import SETTINGS

TOOLS = {
    "scontrol": "echo node1; echo node2",
    # As on Debian: the first node's own name leads to itself.
    "getent": "case $2 in node1) echo 127.0.1.1;; *) echo 10.0.0.2 STREAM node2;; esac",
    "ip": "case $4 in 10.0.0.2) echo 10.0.0.2 dev ib0 src 10.0.0.1 uid 0;;"
    " 10.0.0.1) echo 10.0.0.1 dev eno1 src 10.0.0.2 uid 0;; *) echo local dev lo;; esac",
    "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit; done',
    "python": 'echo "$SLURM_NODEID $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $OMP_NUM_THREADS";'
    ' echo "$PATH|$CUDA_HOME|$PYTHONUNBUFFERED|$ODD"; for word in "$@"; do echo "<$word>"; done',
}


@pytest.fixture
def run(tmp_path):
    """Carry out the script of some options; its output's lines, by node."""
    for name, body in TOOLS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def carry_out(gpus=None, own=None, **options):
        python = str(tmp_path / "python")
        place = ("node1", "ssh", "10.0.0.1", 22, None, python, "tandem", "/data")
        host = Host(*place, gpus=gpus, **(own or {}))
        text = slurm.script(config_of({"nodes": 2, **options}), SETTINGS, host, "a-run")
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_JOB_ID": "1042",
            "SLURM_CPUS_ON_NODE": "8",
            "SLURMD_NODENAME": "node",
            **({"SLURM_GPUS_ON_NODE": str(gpus)} if gpus else {}),
        }
        done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return text, *split(done.stdout)

    return carry_out


def split(output):
    """The lines of node 0 and of node 1."""
    first, _, second = output.partition("\n1 ")
    return [first.splitlines(), ("1 " + second).splitlines()]


def test_each_node_starts_its_part_of_the_same_run(run, tmp_path):
    _, first, second = run(epochs=2, args=["--weights", "two  words $HOME"])
    assert first[0] == "0 ib0 =ib0 8"
    assert second[0] == "1 eno1 =eno1 8"
    common = ["<--nnodes=2>", "<--nproc_per_node=1>", "<--master_addr=10.0.0.1>"]
    common += ["<--master_port=29542>", "<--rdzv_id=a-run-1042>", "<two  words $HOME>"]
    common += ["</data/digits>", f"<{tmp_path}/runs/a-run>", "<auto>"]
    for words in (first, second):
        assert set(common) <= set(words)
    assert [w for w in first if w not in second[1:]] == [first[0], "<--node_rank=0>"]
    assert [w for w in second if w not in first[1:]] == [second[0], "<--node_rank=1>"]


def test_a_node_gets_the_environment_of_a_run_started_by_ssh(run, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    odd = "two  words $HOME `x`"
    env = {"ODD": odd, "ATEN_CPU_CAPABILITY": "default"}
    text, first, second = run(own={"cuda_home": "/opt/cuda", "env": env})
    assert " ONEDNN_MAX_CPU_ISA=AVX2 " in text and " ATEN_CPU_CAPABILITY=default" in text
    assert "ATEN_CPU_CAPABILITY=avx2" not in text
    for words in (first, second):
        path, *rest = words[1].split("|")
        assert path.startswith(f"/opt/cuda/bin:{tmp_path}:")
        assert rest == ["/opt/cuda", "1", odd]


def test_gpus_are_asked_for_and_shared_out(run):
    assert "gpus" not in run()[0].split("set -euo")[0]
    text, first, _ = run(gpus=4)
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "<--nproc_per_node=4>" in first
    assert first[0].endswith(" 2")  # threads: 8 cores over 4 processes


def test_a_batch_that_the_nodes_could_not_split_is_refused(run):
    with pytest.raises(UserError, match=r"BATCH=32 .* 20 processes of each node.*BATCH=40"):
        run(gpus=20)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """written() -> the scripts that `make slurm` has left."""
    place = ("node1", "ssh", "10.0.0.1", 22, None, "python", "tandem", "/data")
    env = {"PASSWORD": "secret"}
    monkeypatch.setattr(slurm, "refuse", lambda *_: None)
    monkeypatch.setattr(slurm.inventory, "load", lambda _: [Host(*place, env=env)] * 2)
    monkeypatch.setattr(slurm, "CHECKOUT", tmp_path)
    return lambda: list((tmp_path / "runs").iterdir())


def test_a_script_is_for_all_machines_and_its_owners_alone(written, capsys):
    """It has run_env, which may hold a password."""
    assert slurm.main(Config(data="digits")) == 0
    (script,) = written()
    text = script.read_text()
    assert "#SBATCH --nodes=2\n" in text and "PASSWORD=secret" in text
    assert script.stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out.splitlines()[1] == f"sbatch runs/{script.name}"


def test_a_script_is_written_whole_or_not_at_all(written):
    """On a disk that takes 100 bytes of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            slurm.main(Config(nodes=2, data="digits"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert written() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "resnet19"}, "MODEL=resnet19: torchvision"),
        ({"model": "examples.nosuch:net"}, "is there a module examples.nosuch"),
        ({"data": "nosuch"}, "nosuch is missing"),
        ({"nodes": 4}, "NODES=4: Slurm's largest partition has 3 here"),
        ({"nodes": 3}, None),
    ],
)
def test_what_the_job_would_fail_by_is_refused_before(monkeypatch, tmp_path, options, said):
    """Of this machine's torchvision and data, as on a cluster's login node; sinfo is a stand-in."""
    (tmp_path / "data/digits").mkdir(parents=True)
    for split in ("train", "val"):
        for name in "ab":
            image = tmp_path / "data/digits" / split / name / "0.png"
            image.parent.mkdir(parents=True)
            image.touch()
    sinfo = tmp_path / "bin/sinfo"
    sinfo.parent.mkdir()
    sinfo.write_text("#!/bin/sh\necho 2; echo 3\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sinfo.parent}:{os.environ['PATH']}")
    # What this torchvision has, as a machine keeps it: to ask anew takes seconds, and is no matter
    # of this test; on a busy machine no answer would come in time.
    monkeypatch.setattr(slurm, "CHECKOUT", tmp_path)
    kept = tmp_path / ".tandem/slurm/manifests/models.json"
    kept.parent.mkdir(parents=True)
    key = [importlib.metadata.version("torchvision"), sys.prefix, models.rule("resnet18")]
    kept.write_text(json.dumps({"key": key, "names": ["resnet18"]}))
    place = ("n1", "local", "127.0.0.1", 22, None, "python", "tandem", str(tmp_path / "data"))
    given = config_of({"model": "resnet18", "batch": 1, **options})
    settings = replace(SETTINGS, model=given.trainer["model"])

    def refuse():
        slurm.refuse(Host(*place), given, settings, given.nodes or 2)

    if said is None:
        refuse()
    else:
        with pytest.raises(UserError) as caught:
            refuse()
        assert said in str(caught.value)
