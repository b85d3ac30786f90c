"""The batch script for Slurm, carried out with stand-ins for Slurm's tools and names and ways of
machines; with real ones in tests/lab/test_slurm.py."""

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
from launcher.node import slurm as node
from launcher.options import config_of
from launcher.plan import models
from tests.unit.launcher.launcher_values import SETTINGS

# Prints what the batch script starts, and with which job.
PYTHON = """#!/bin/sh
printf '%s\\n' "$TANDEM_JOB" "$*" "$PWD"
"""
# By which card, and from which address, a node reaches another.
ROUTES = {
    "10.0.0.2": {"interface": "ib0", "source": "10.0.0.1"},
    "10.0.0.1": {"interface": "eno1", "source": "10.0.0.2"},
    "127.0.0.1": {"interface": "lo", "source": "127.0.0.1"},
}
NAMES = {"node1": "127.0.1.1", "node2": "10.0.0.2"}  # on node1, as on Debian
COMMON = {
    "PATH": "/usr/bin",
    "SLURM_JOB_ID": "1042",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURMD_NODENAME": "node",
}


class Became(Exception):
    """A process became another program."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Carry out the script of some options: its text, and of each node the launch's argv, what it
    gives the trainer, and its environment."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def become(argv, environment):
        raise Became(list(argv), dict(environment))

    def part(job, environment):
        with pytest.raises(Became) as became:
            node.become(json.loads(job), environment)
        argv, env = became.value.args
        assert argv[-3:-1] == ["trainer", "--config"]
        return argv[:-1], json.loads(argv[-1]), env

    monkeypatch.setattr(node.os, "execvpe", lambda _, *words: become(*words))
    monkeypatch.setattr(node, "address_of", NAMES.get)
    monkeypatch.setattr(node, "route", ROUTES.get)

    def carry_out(gpus=None, own=None, nodes=2, **options):
        place = ("node1", "ssh", "10.0.0.1", 22, None, str(python), "tandem", "/data")
        host = Host(*place, gpus=gpus, **(own or {}))
        config = config_of({"nodes": nodes, **options})
        text = slurm.script(config, SETTINGS, host, "a-run")
        env = {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
        done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        job, *rest = done.stdout.splitlines()
        assert rest == ["-m launcher.node.slurm", str(tmp_path)]
        monkeypatch.chdir(tmp_path)
        of_job = {**COMMON, **node.meeting(["node1", "node2"][:nodes]), "SLURM_NNODES": str(nodes)}
        of_job.update({"SLURM_GPUS_ON_NODE": str(gpus)} if gpus else {}, TANDEM_JOB=job)
        return text, *(part(job, {**of_job, "SLURM_NODEID": str(n)}) for n in range(nodes))

    return carry_out


def test_each_node_starts_its_part_of_the_same_run(run, tmp_path):
    text = "two  words $HOME `x` 'y'"
    _, (argv, given, env), (other, same, others) = run(epochs=2, args=["--weights", text])
    assert (env["GLOO_SOCKET_IFNAME"], others["GLOO_SOCKET_IFNAME"]) == ("ib0", "eno1")
    assert (env["NCCL_SOCKET_IFNAME"], env["OMP_NUM_THREADS"]) == ("=ib0", "8")
    common = {"--nnodes=2", "--nproc_per_node=1", "--master_addr=10.0.0.1"}
    common |= {"--master_port=29542", "--rdzv_id=a-run-1042"}
    assert common <= {*argv} and common <= {*other}
    assert {*argv} ^ {*other} == {"--node_rank=0", "--node_rank=1"}
    assert given == same and given["weights"] == text and given["epochs"] == 2
    assert (given["data"], given["resume"]) == ("/data/digits", "auto")
    assert given["output"] == f"{tmp_path}/runs/a-run"
    _, (argv, *_) = run(nodes=1)
    assert "--master_addr=127.0.0.1" in argv


def test_a_node_gets_the_environment_of_a_run_started_by_ssh(run, monkeypatch):
    """No part of it stands on a command line, which other users can read."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    odd = "two  words $HOME `x` 'y'"
    own = {"ODD": odd, "ATEN_CPU_CAPABILITY": "default"}
    _, *parts = run(own={"cuda_home": "/opt/cuda", "env": own})
    for argv, _, env in parts:
        assert own.items() <= env.items() and env["ONEDNN_MAX_CPU_ISA"] == "AVX2"
        assert env["PATH"] == "/opt/cuda/bin:/usr/bin" and env["CUDA_HOME"] == "/opt/cuda"
        assert (env["TANDEM_NODE"], env["TANDEM_ATTEMPT"]) == ("node", "1")
        assert "NCCL_IB_DISABLE" not in env and "TANDEM_JOB" not in env
        assert not any(odd in word for word in argv)


def test_a_job_whose_second_node_cannot_be_reached_says_so(capsys):
    with pytest.raises(SystemExit, match=r"localhost means .*, by which no other node is reached"):
        node.address_of("localhost")


def test_gpus_are_asked_for_and_shared_out(run):
    assert "gpus" not in run()[0].split("set -euo")[0]
    text, (argv, _, env), _ = run(gpus=4)
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "--nproc_per_node=4" in argv
    assert env["OMP_NUM_THREADS"] == "2"  # 8 cores over 4 processes


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
    assert "#SBATCH --nodes=2\n" in text and '"PASSWORD": "secret"' in text
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
