"""What the trainer and `tandem.sync.attach` refuse before a step is made, and which precision a run
gets."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from contract import strategies
from contract.command_line import parse
from contract.errors import UserError
from contract.options import Options
from contract.precisions import Device, resolve
from tandem import sync
from trainer.finite import describe

OPTIONS = {
    "no such option": "--epoch 3",
    "no number": "--lr much",
    "not finite": "--lr nan",
    "too low": "--epochs 0",
    "too high": "--label_smoothing 3",
    "none of the choices": "--optimizer rmsprop",
    "another name of fp16": "--precision half",
    "no truth": "--sync_bn perhaps",
    "resumes from nowhere": "--resume auto",
    "writes nowhere": "--sample_log",
    "no file": "--config /nowhere.yaml",
}
STRATEGIES = (
    "alreduce",
    "auto",
    "bf16:gloo",
    "ef:7",
    "ef:5:mean",
)


def gpu(host, name, sm, torch="2.15.0", cuda="13.2"):
    return Device(host, "cuda", name, sm, False, torch, cuda)


CPU = Device("node7", "cpu", "x86_64", 0, False, "2.15.0", "13.2")
PASCAL, TURING = gpu("node1", "GeForce GTX 1080 Ti", 61), gpu("node3", "GeForce RTX 2080 Ti", 75)
AMPERE = gpu("node4", "GeForce RTX 3090", 86)
OLD = AMPERE._replace(torch="1.12.1+cu102", cuda="10.2")
V100S = [gpu(f"node{n}", "Tesla V100", 70) for n in (1, 1, 2, 3, 4, 5)]
LEVELS = {
    "auto": [[AMPERE], [OLD], [PASCAL, AMPERE], [CPU], V100S, [AMPERE, CPU]],
    "bf16": [[AMPERE, TURING], [OLD], [CPU]],
    "O1": [[CPU], [AMPERE, PASCAL]],
}


class FSDPModule(torch.nn.Module):
    """A stand-in: what torch's fully_shard makes a model's class inherit from."""


def sentence(function):
    try:
        return function()
    except UserError as error:
        return str(error)


def level(name, devices, **settings):
    return sentence(lambda: ": ".join(resolve(name, devices, **settings)))


def attachments():
    """What `attach` refuses of a model, and what it refuses to load."""
    net = torch.nn.Linear(2, 2)
    with_hook = DistributedDataParallel(net)
    with_hook.register_comm_hook(None, lambda _, bucket: None)
    yield "no DDP", lambda: sync.attach(net, "ef:5")
    yield "FSDP", lambda: sync.attach(FSDPModule(), "ef:5")
    yield "no strategy", lambda: sync.attach(DistributedDataParallel(net), "ef:7")
    rare = torch.nn.Sequential(torch.nn.Embedding(2, 2, sparse=True))
    yield "auto", lambda: sync.attach(DistributedDataParallel(net), "auto")
    yield "sparse gradients", lambda: sync.attach(DistributedDataParallel(rare), "ef:5")
    yield "no steps", lambda: sync.attach(DistributedDataParallel(net), "ef:5", -1)
    yield "another hook", lambda: sync.attach(with_hook, "ef:5")
    ddp = DistributedDataParallel(net)
    ours = sync.attach(ddp, "ef:5")
    yield "no backward", lambda: ours.warm_up_buckets(lambda: None)
    hooked, _ = sync.hook("ef:5")
    yield "a hook settles", lambda: hooked.warm_up_buckets(lambda: None)
    yield "a hook keeps a state", hooked.state_dict
    state = ours.state_dict()
    for name, value in {"spec": "ef:15", "nodes": [0, 0], "steps": True}.items():
        other = {**state, name: value}
        yield f"state: {name}", lambda other=other: ours.load_state_dict(other)
    del state["sync"]
    yield "state: nothing left out", lambda: ours.load_state_dict(state)
    yield "no state", lambda: ours.load_state_dict([])


def divergences():
    trouble = {"epoch": 2, "tensor": "0.weight"}
    silent = {**trouble, "step": 6, "loss": None, "host": "node6", "rank": 0}
    first = {**trouble, "step": 7, "loss": "NaN", "host": "node7", "rank": 1}
    options = Options(sync="ef:15", precision="O1", model="own.py:net", lr=0.05)
    world = SimpleNamespace(size=2)
    yield "on one rank", describe([silent, first], options, world)
    yield "without a loss", describe([silent], Options(clip_grad_norm=1.0), world)


def render():
    every = {}
    for code, words in OPTIONS.items():
        every[f"option: {code}"] = sentence(lambda words=words: parse(words.split()))
    for spec in STRATEGIES:
        every[f"strategy: {spec}"] = sentence(lambda spec=spec: strategies.parse(spec))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        every.update({f"attach: {code}": sentence(function) for code, function in attachments()})
    finally:
        dist.destroy_process_group()
    for name, groups in LEVELS.items():
        for devices in groups:
            names = ", ".join(dict.fromkeys(f"{one.name} of {one.torch}" for one in devices))
            every[f"precision: {name} on {names}"] = level(name, devices)
    every["precision: that of a run that goes on"] = level("bf16", [TURING], is_earlier=True)
    every["precision: emulated by an old torch"] = level("bf16", [OLD], emulate=True)
    every.update({f"diverged {code}": text for code, text in divergences()})
    return every
