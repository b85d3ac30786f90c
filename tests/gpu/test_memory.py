"""Real memory runs out, of a part of the GPU's, or of the process's on a CPU: which code it ends
with, and that smaller micro-batches fit then.
"""

import ctypes
import json
import os
import pathlib
import resource

import pytest
import torch

from contract.errors import OUT_OF_MEMORY
from tests.trainer_ranks import make_images, run_ranks, trainer
from trainer.memory import OutOfMemory, detect_out_of_memory, is_out_of_memory

MIB = 2**20
LIMIT = 400 * MIB
M_ARENA_MAX = -8  # of glibc's malloc.h


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """40 images to evaluate on, which do not fit at once."""
    return make_images(tmp_path_factory.mktemp("many"), per_class=10, val=10)


def limit(device, size):
    """In a rank: from here on so many more bytes, and not one above."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(size / total)
        return
    # Each thread that allocates would take 64 MiB of addresses of its own, sooner or later.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    used = pages * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + size, resource.RLIM_INFINITY))


def limited(device, beside, *argv):
    """In a rank: the trainer's exit code. `beside`: so much of a GPU's memory is free, too."""
    limit(device, LIMIT + (beside if device.type == "cuda" else 0))
    return trainer(*argv)


def code(many, device, *argv, divisor=1, model="hungry", batch=40, beside=0):
    words = ["--data", many, "--device", device.type, "--model", f"tests.gpu.models:{model}"]
    words += ["--precision", "fp32", "--workers", 0, "--augment", "none", "--epochs", 1]
    words += ["--per_node_batch_size", batch, *argv]
    env = {"TANDEM_MICRO_BATCH_DIVISOR": divisor}
    return run_ranks([1], limited, device, beside, *words, env=env, quiet=True)[0]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        pytest.param({}, OUT_OF_MEMORY, marks=pytest.mark.quick),
        ({"divisor": 8}, 0),  # as the launcher starts it again; evaluation fits, too
        ({"model": "hungry_in_evaluation", "batch": 4}, OUT_OF_MEMORY),
    ],
    ids=["a step", "smaller micro-batches", "an evaluation"],
)
def test_what_does_not_fit_ends_with_the_code_of_memory(many, device, given, wanted):
    assert code(many, device, **given) == wanted


def test_auto_batch_finds_micro_batches_that_fit(many, device, tmp_path):
    """Not the whole batch, which fits beside what has to stay free of a large card, nor single
    images."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    argv = ["--auto_batch", "--output", tmp_path]
    assert code(many, device, *argv, beside=total // 20) == 0
    lines = (tmp_path / "nodes/node1/rank0.1.steps.jsonl").read_text().splitlines()
    assert 2 <= json.loads(lines[0])["accumulate"] <= 16


def squeezed(device):
    """In a rank: errors of a convolution that is left less and less room, none for a workspace at
    last, which are not told apart from others."""
    limit(device, LIMIT)
    conv = torch.nn.Conv2d(64, 64, 5, padding=2, bias=False).to(device)
    images = torch.randn(32, 64, 64, 64, device=device, requires_grad=True)
    strange, failed = [], 0
    for room in (200, 96, 64, 48, 36, 33, 32, 8, 4):  # CUDA gives memory in pieces of 2 MiB
        free = LIMIT - torch.cuda.memory_reserved() - room * MIB
        ballast = torch.empty(max(free, 0), dtype=torch.uint8, device=device)
        try:
            with detect_out_of_memory():
                conv(images).sum().backward()
        except RuntimeError as error:
            failed += 1
            strange += [] if isinstance(error, OutOfMemory) else [str(error)]
        conv.zero_grad(set_to_none=True)
        images.grad = None
        del ballast
        torch.cuda.empty_cache()
    return failed, strange


@pytest.mark.needs_gpu
def test_a_convolution_without_room_for_its_workspace_is_out_of_memory(device):
    failed, strange = run_ranks([1], squeezed, device)[0]
    assert failed > 0
    assert strange == []


def filled(device):
    """In a rank: what a product says for whose handle the whole card has no room."""
    torch.cuda.set_device(device)
    held, size = [], torch.cuda.mem_get_info()[0] // 2
    square = torch.ones(64, 64, device=device)
    while size >= MIB:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except RuntimeError:
            size //= 2
    try:
        float((square @ square).sum())
    except RuntimeError as error:
        return is_out_of_memory(error), str(error)
    return True, "there was room"


@pytest.mark.needs_gpu
def test_a_handle_without_room_is_out_of_memory(device):
    known, said = run_ranks([1], filled, device)[0]
    assert known, said
