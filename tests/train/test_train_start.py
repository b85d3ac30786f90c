"""The same command under launch, torchrun, mpirun's environment, --spawn and nothing."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.trainer_ranks import free_port, make_images

LAUNCH = ["-m", "torch.distributed.launch", "--nproc_per_node=2", "--master_port"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port"]


@pytest.mark.parametrize("how", ["launch", "torchrun", "spawn", "alone", "mpirun"])
def test_started(tmp_path, how):
    """Pitfall 1: --spawn assigns ranks itself. Pitfall 11: one rank speaks."""
    images = make_images(tmp_path / "images", per_class=4)
    before = {"launch": LAUNCH, "torchrun": TORCHRUN}.get(how, [])
    argv = [sys.executable, *before, *([str(free_port())] if before else []), "-m", "trainer"]
    argv += ["--data", images, "--model", "tests.trainer_models:plain", "--epochs", 1]
    argv += ["--output", tmp_path / "run", *(["--spawn", 2] if how == "spawn" else [])]
    argv = [str(word) for word in argv]
    env = {**os.environ, "TANDEM_NODE": "here", "OMP_NUM_THREADS": "1"}
    if not before:  # torch.distributed.launch gives one itself
        env["PYTHONWARNINGS"] = "error::FutureWarning"
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    started = []
    for rank in range(2 if how == "mpirun" else 1):
        mpi = dict(zip(names, (rank, 2, rank, 2))) if how == "mpirun" else {}
        own = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in mpi.items()}
        own.update({"MASTER_PORT": env.setdefault("TEST_PORT", str(free_port()))} if mpi else {})
        started.append(
            subprocess.Popen(argv, env={**env, **own}, stdout=subprocess.PIPE, text=True)
        )
    said = "".join(process.communicate()[0] for process in started)
    assert [process.returncode for process in started] == [0] * len(started)
    ranks = 1 if how == "alone" else 2
    assert said.count(f"over {ranks} rank") == 1
    files = sorted((tmp_path / "run/nodes/here").glob("rank*.steps.jsonl"))
    starts = [json.loads(path.read_text().splitlines()[0]) for path in files]
    assert [start["local_rank"] for start in starts] == list(range(ranks))
    assert {start["world_size"] for start in starts} == {ranks}


LIMITS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def test_the_start_line_names_the_instructions_that_are_used(tmp_path):
    """What oneDNN says of itself agrees: newer instructions of this CPU are really not used."""
    images = make_images(tmp_path / "images", per_class=4)
    argv = [sys.executable, "-m", "trainer", "--model", "tests.trainer_models:normed"]
    argv += ["--data", str(images), "--epochs", "1", "--output", str(tmp_path)]
    env = {**os.environ, **LIMITS, "TANDEM_NODE": "here", "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"info,cpu,isa:(.*)", done.stdout)) == {"Intel AVX2"}
    path = tmp_path / "nodes/here/rank0.steps.jsonl"
    start = json.loads(path.read_text().splitlines()[0])
    assert start["instructions"] == {"aten": "AVX2", "onednn_limit": "AVX2"}
