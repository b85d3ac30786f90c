"""Which precision a run gets: the table of devices, what is refused, and that a run keeps it."""

import os

import pytest
import torch

from contract.errors import UserError
from contract.options import Options
from contract.precisions import Device, resolve
from tests.trainer_ranks import lines, run_ranks, said, snapshot, trainer
from trainer.checkpoint import fixed_options
from trainer.decide import decide
from trainer.world import World, describe_device
from trainer.writer import write_whole


def gpu(host, name, sm, torch="2.15.0", cuda="13.2"):
    return Device(host, "cuda", name, sm, False, torch, cuda)


def cpu(host="node1", bf16=False):
    return Device(host, "cpu", "x86_64", 0, bf16, "2.15.0", "13.2")


PASCAL = gpu("node1", "GeForce GTX 1080 Ti", 61)
TURING, AMPERE = gpu("node3", "GeForce RTX 2080 Ti", 75), gpu("node4", "GeForce RTX 3090", 86)
BLACKWELL = gpu("node6", "GeForce RTX 5090", 120)
OLD_TORCH = {"torch": "1.12.1+cu102", "cuda": "10.2"}
AMPERE_OLD = gpu("node4", "GeForce RTX 3090", 86, **OLD_TORCH)
AMPERE_113 = gpu("node4", "GeForce RTX 3090", 86, torch="1.12.1+cu113", cuda="11.3")


@pytest.mark.parametrize(
    "devices, level",
    [
        ([AMPERE, BLACKWELL], "bf16"),
        ([AMPERE_113], "bf16"),
        ([AMPERE_OLD], "O1"),
        ([TURING], "O1"),
        ([AMPERE, TURING], "O1"),
        ([PASCAL, AMPERE], "fp32"),
        ([cpu(bf16=True), cpu("node2", bf16=True)], "fp32"),
    ],
)
def test_auto_is_the_best_that_all_devices_have(devices, level):
    """Why, and what is refused: tests/messages/trainer.py."""
    assert resolve("auto", devices).name == level
    for asked in ("fp32", "fp64", "O0"):
        assert resolve(asked, devices) == (asked, "as asked")


@pytest.mark.parametrize(
    "flags, limit, has",
    [
        ("avx2 avx512f avx512_vnni", None, False),
        ("amx_tile amx_bf16", None, True),
        ("avx512_bf16", "avx512_core", False),
        ("avx512_bf16", "AVX512_CORE_BF16", True),
    ],
)
def test_a_cpu_s_bf16_is_what_onednn_may_use(monkeypatch, tmp_path, flags, limit, has):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor: 0\nflags\t\t: {flags} fma\n")
    monkeypatch.setattr("trainer.world.CPUINFO", cpuinfo)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    device = describe_device(torch.device("cpu"), "node1", Options())
    assert (device.kind, device.bf16) == ("cpu", has)


# The ranks' own devices


def settled(devices, name="precision", **settings):
    """What a rank makes of its options when the ranks have these devices."""
    return getattr(decide(Options(**settings), World(devices=tuple(devices)))[0], name)


def run(images, output, *more):
    small = ["--model", "tests.trainer_models:plain", "--workers", 0, "--epochs", 1]
    return run_ranks([1, 1], trainer, "--data", images, "--output", output, *small, *more)


def test_by_hand_a_run_that_goes_on_keeps_its_precision_on_other_machines(images, tmp_path):
    """Begun on CPUs in bf16; goes on with `auto` where the best would be another level, and is
    refused by name where a GPU does not have it."""
    assert run(images, tmp_path, "--precision", "bf16", "--emulate") == [0, 0]
    again = {"output": str(tmp_path), "resume": "auto"}
    assert settled([AMPERE], **again) == "bf16"
    assert settled([cpu(bf16=True)], **again) == "bf16"
    with pytest.raises(UserError, match=r"bf16: GeForce RTX 2080 Ti \(node3\).*omit node3"):
        settled([AMPERE, TURING], **again)
    with pytest.raises(UserError, match="the CPU of node1"):
        settled([cpu()], **again)
    assert settled([cpu()], output=str(tmp_path)) == "fp32"  # a new run
    more = ["--resume", "auto", "--lr", 0.2, "--precision", "bf16", "--emulate"]
    assert run(images, tmp_path, *more) == [2, 2]  # another learning rate, and no other option


def test_auto_is_settled_before_the_start_line_and_found_in_the_checkpoint(images, tmp_path):
    assert run(images, tmp_path / "new") == [0, 0]
    assert run(images, tmp_path / "old", "--precision", "fp64") == [0, 0]
    assert run(images, tmp_path / "old", "--resume", "auto") == [0, 0]
    for name, wanted in (("new", ["fp32"]), ("old", ["fp64", "fp64"])):
        for starts in lines(tmp_path / name, "start"):
            assert [one["precision"] for one in starts] == wanted


def said_with_a_gpu_on_rank_1(*argv):
    """As `said`, in ranks whose second one has a GPU by its own account."""
    from trainer import world

    if os.environ["RANK"] == "1":
        world.describe_device = lambda *_: AMPERE._replace(host="node2")
    return said(*argv)


def test_a_gpu_among_cpus_ends_all_ranks_instead_of_a_hang(images):
    """Before the group is formed: NCCL and Gloo would wait for each other."""
    more = ["--model", "tests.trainer_models:plain", "--timeout", 20]
    for code, text in run_ranks([1, 1], said_with_a_gpu_on_rank_1, "--data", images, *more):
        assert (code, text.count("\n")) == (2, 1), text
        assert "GeForce RTX 3090 (node2) and the CPU of node1" in text


@pytest.mark.parametrize(
    "parallel, wanted", [("ddp", ("RTX 3090", 86)), ("dp", ("Tesla V100", 70))]
)
def test_a_rank_tells_its_gpu_and_with_dp_the_weakest(monkeypatch, parallel, wanted):
    known = [("RTX 4090", 8, 9), ("RTX 3090", 8, 6), ("Tesla V100", 7, 0)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(known))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: known[number][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: known[number][1:])
    device = describe_device(torch.device("cuda", 1), "node4", Options(parallel=parallel))
    assert (device.host, device.kind, device.name, device.sm) == ("node4", "cuda", *wanted)
    assert (device.torch, device.cuda) == (str(torch.__version__), torch.version.cuda)


@pytest.mark.parametrize(
    "devices, settings, on",
    [
        ([AMPERE, AMPERE], {}, True),
        ([AMPERE], {"precision": "O2"}, True),
        ([AMPERE], {"precision": "fp32"}, False),
        ([AMPERE], {"deterministic": True}, False),
        ([cpu(bf16=True)], {"precision": "bf16"}, False),
    ],
)
def test_tensor_cores_get_their_memory_format_and_cudnn_s_fastest(
    monkeypatch, devices, settings, on
):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert settled(devices, "channels_last", **settings) is on
    assert torch.backends.cudnn.benchmark is on
    for asked in (True, False):
        assert settled(devices, "channels_last", channels_last=asked, **settings) is asked


@pytest.mark.parametrize("name", ["channels_last", "jpeg_scaling"])
def test_a_run_that_goes_on_keeps_what_it_began_with(monkeypatch, tmp_path, name):
    """On other machines too."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    state = snapshot(options=fixed_options(Options(precision="O1", **{name: True})))
    path, again = tmp_path / "checkpoints/node1/step-1.pt", {"output": str(tmp_path)}
    again["resume"] = "auto"
    write_whole(state, path)
    assert settled([TURING], "precision", **again) == "O1"
    assert settled([AMPERE], "deterministic", **again) is False
    assert settled([AMPERE], name, **again) is True
    assert settled([AMPERE], name, **again, deterministic=True) is True
    assert settled([AMPERE], name, **again, **{name: False}) is False
