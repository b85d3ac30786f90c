"""What the trainer and `tandem.sync.attach` refuse before a step is made, and which precision a run
gets."""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from contract import strategies
from contract.command_line import parse
from contract.errors import UserError
from contract.levels import Device, resolve
from contract.options import Options
from tandem import sync
from trainer.finite import sentences

OPTIONS = {
    "no such option": "--epoch 3",
    "option that is gone": "--sync_rule qsr:1",
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
STRATEGIES = ("alreduce", "auto", "bf16:gloo:2", "ef:3", "powersgd:0", "overlap:6")


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


def said(function):
    try:
        return function()
    except UserError as error:
        return str(error)


def level(asked, devices, **settings):
    return said(lambda: ": ".join(resolve(asked, devices, **settings)))


@contextlib.contextmanager
def alone():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def attached():
    """What `attach` refuses of a model, and what it refuses to load."""
    net = torch.nn.Linear(2, 2)
    hooked, late = DistributedDataParallel(net), DistributedDataParallel(net)
    hooked.register_comm_hook(None, lambda _, bucket: None)
    late(torch.ones(1, 2))
    yield "no DDP", lambda: sync.attach(net, "ef:2")
    yield "FSDP", lambda: sync.attach(FSDPModule(), "ef:2")
    yield "no strategy", lambda: sync.attach(DistributedDataParallel(net), "ef:3")
    yield "no steps", lambda: sync.attach(DistributedDataParallel(net), "ef:2", -1)
    yield "it has run", lambda: sync.attach(late, "ef:2")
    yield "another hook", lambda: sync.attach(hooked, "ef:2")
    ours = sync.attach(DistributedDataParallel(net), "ef:2")
    yield "no backward", lambda: ours.settle(lambda: None)
    state = ours.state_dict()
    for name, value in {"spec": "ef:4", "nodes": [0, 0], "steps": True}.items():
        changed = {**state, name: value}
        yield f"state: {name}", lambda changed=changed: ours.load_state_dict(changed)
    del state["sync"]
    yield "state: nothing left out", lambda: ours.load_state_dict(state)
    yield "no state", lambda: ours.load_state_dict([])


def render():
    made = {f"option: {code}": said(lambda w=w: parse(w.split())) for code, w in OPTIONS.items()}
    for spec in STRATEGIES:
        made[f"strategy: {spec}"] = said(lambda spec=spec: strategies.parse(spec))
    with alone():
        made.update({f"attach: {code}": said(function) for code, function in attached()})
    for asked, every in LEVELS.items():
        for devices in every:
            names = ", ".join(dict.fromkeys(f"{one.name} of {one.torch}" for one in devices))
            made[f"precision: {asked} on {names}"] = level(asked, devices)
    made["precision: that of a run that goes on"] = level("bf16", [TURING], kept=True)
    made["precision: emulated by an old torch"] = level("bf16", [OLD], emulate=True)
    begun = [{"step": step, "epoch": 2, "loss": loss, "host": f"node{step}", "rank": step - 6,
              "tensor": "0.weight"} for step, loss in ((6, None), (7, "NaN"))]  # fmt: skip
    options = Options(sync="ef:4", precision="O1", model="own.py:net", lr=0.05)
    world = SimpleNamespace(size=2)
    made["diverged on one rank"] = sentences(begun, options, world)
    made["diverged without a loss"] = sentences(begun[:1], Options(clip_grad_norm=1.0), world)
    return made
