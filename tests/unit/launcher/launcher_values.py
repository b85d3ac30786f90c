"""Hosts, facts and plans for tests."""

import json
from dataclasses import replace

from contract.options import Config
from contract.options import Options as TrainerOptions
from launcher.machines.engine import Host
from launcher.machines.probe import Facts
from launcher.options import config_of, document
from launcher.plan import plan as making
from launcher.plan.code import Code

SETTINGS = TrainerOptions(epochs=3)
VERSIONS = {"python": "3.11.2", "torch": "2.15.0", "torchvision": "0.29.2", "cuda": "13.2"}
NO_GPUS = {
    "count": 0,
    "cards": [],
    "driver": None,
    "processes": [],
    "error": None,
    "cards_on_bus": 0,
}
CODE = Code(names=(), sha256="c0de" * 16, git_revision=None, git_diff="")
LISTING = {"classes": 10, "images": 1442, "sha256": "ab" * 32}
DATA = {
    "path": "/d",
    "exists": True,
    "problem": None,
    "splits": {"train": LISTING, "val": LISTING},
    "others": [],
}


def host(number, **changes):
    values = {
        "name": f"node{number}",
        "connection": "ssh",
        "address": f"192.0.2.{number}",
        "port": 22,
        "user": "tandem",
        "env_python": "/opt/tandem/env/bin/python",
        "node_dir": "tandem",
        "data_root": "/srv/tandem/data",
    }
    return Host(**{**values, **changes})


def facts(number, **changes):
    values = {
        "host": f"node{number}",
        "unix": 100.0,
        "asked_unix": 100.0,
        "answered_unix": 100.1,
        "home": "/home/tandem",
        "hostname": f"node{number}",
        "cores": 8,
        "cpu_flags": [],
        "machine": f"machine{number}",
        "versions": VERSIONS,
        "models": ["resnet18", "resnet34", "resnet50", "vgg11"],
        "packages": {},
        "distributions": {"torch": "2.15.0"},
        "glibc": 36,
        "runs": [],
        "paths": {},
        "gpus": NO_GPUS,
        "routes": {"192.0.2.1": {"interface": "eno1", "source": "192.0.2.9", "error": None}},
        "free_ports": (29500, 29501, 29502),
        "data": DATA,
        "disk_free": 1 << 40,
        "writable": True,
        "guard_python": True,
    }
    return Facts(**{**values, **changes})


def card(number=0, **changes):
    name = "NVIDIA GeForce RTX 2080 Ti"
    return {"name": name, "uuid": f"GPU-{number}a-b-c", "pci": "1e07", "sm": 75, **changes}


def gpus(count, **changes):
    cards = [card(number) for number in range(count)]
    return {**NO_GPUS, "count": count, "cards": cards, "driver": "580.1", **changes}


def build(hosts, found, options=None, settings=None, **details):
    request = making.Request(**{"run": "r", "unix": 0.0, **details})
    named = {one.host: one for one in found}
    return making.build(
        hosts, named, options or Config(), replace(SETTINGS, **(settings or {})), CODE, request
    )


def planned(precision="fp32", sync="allreduce", **options):
    """What RESUME reads of plan.json."""
    return {"options": document(config_of(options)), "precision": precision, "sync": sync}


def sent_to_trainer(node):
    """What a NodePlan gives the trainer."""
    return json.loads(node.argv[node.argv.index("--config") + 1])
