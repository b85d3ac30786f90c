"""The same command under launch, torchrun, mpirun's environment, --spawn and nothing."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.trainer_ranks import free_port, make_images

MODULES = {"launch": "torch.distributed.launch", "torchrun": "torch.distributed.run"}
LIMITS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_VERBOSE": "1"}
HOW = ["spawn", *(pytest.param(how, marks=pytest.mark.long) for how in (*MODULES, "mpirun"))]


def environments(how):
    """Of each process that is started."""
    env = {**os.environ, "TANDEM_NODE": "here", "OMP_NUM_THREADS": "1"}
    if how not in MODULES:  # torch.distributed.launch gives one itself
        env["PYTHONWARNINGS"] = "error::FutureWarning"
    if how != "mpirun":
        return [env]
    env |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    env["MASTER_PORT"] = str(free_port())
    ranks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    return [{**env, **dict.fromkeys(ranks, rank)} for rank in "01"]


def started(folder, how, model, **more):
    """What the ranks said, and their start lines."""
    images, argv = make_images(folder / "images", per_class=4), [sys.executable]
    if how in MODULES:
        argv += ["-m", MODULES[how], "--nproc_per_node=2", f"--master_port={free_port()}"]
    argv += ["-m", "trainer", "--data", str(images), "--model", f"tests.trainer_models:{model}"]
    argv += ["--epochs", "1", "--output", str(folder / "run")]
    argv += ["--spawn", "2"] * (how == "spawn")
    running = [
        subprocess.Popen(argv, env={**env, **more}, stdout=subprocess.PIPE, text=True)
        for env in environments(how)
    ]
    said = "".join(process.communicate()[0] for process in running)
    assert not any(process.returncode for process in running), said
    files = sorted((folder / "run/nodes/here").glob("rank*.steps.jsonl"))
    return said, [json.loads(path.read_text().splitlines()[0]) for path in files]


@pytest.mark.parametrize("how", HOW)
def test_started(tmp_path, how):
    """Pitfall 1: --spawn assigns ranks itself. Pitfall 11: one rank speaks."""
    said, starts = started(tmp_path, how, "plain")
    assert said.count("over 2 ranks") == 1
    assert [(one["local_rank"], one["world_size"]) for one in starts] == [(0, 2), (1, 2)]


@pytest.mark.long  # the demo has these instructions, too
def test_alone_its_start_line_names_the_instructions_that_are_used(tmp_path):
    """What oneDNN says of itself agrees: newer instructions of this CPU are really not used."""
    said, (start,) = started(tmp_path, "alone", "normed", **LIMITS)
    assert set(re.findall(r"info,cpu,isa:(.*)", said)) == {"Intel AVX2"}
    assert start["instructions"] == {"aten": "AVX2", "onednn_limit": "AVX2"}
    assert said.count("over 1 rank") == start["world_size"] == 1
