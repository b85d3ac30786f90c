"""Hosts, facts and plans for tests."""

import contextlib
import dataclasses
import json

import pytest
from msgspec import structs

from boundary.answers import NodeFacts
from boundary.schema import convert
from contract.options import Config
from launcher import judge
from launcher.look import ControlFacts, OpenMachines
from launcher.machines.engine import Host
from launcher.options import document, make_config
from launcher.plan import plan as making
from launcher.plan.code import Code
from launcher.problems import Refused
from launcher.program import Needs
from launcher.programs import build_program

OPTIONS = {"epochs": 3}
VERSIONS = {
    **{"python": "3.11.2", "torch": "2.15.0", "torchvision": "0.29.2", "cuda": "13.2"},
    "nccl": None,
}
NO_GPUS = {"cards": [], "driver": None, "processes": [], "error": None, "on_bus": 0}
CODE = Code(names=(), sha256="c0de" * 16, git_revision=None, git_diff="")
LISTING = {"classes": 10, "images": 1442, "sha256": "ab" * 32, "note": ""}
DATA = {
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


ANSWER = {
    "unix": 100.0,
    "home": "/home/tandem",
    "cores": 8,
    "cpu_flags": [],
    "versions": VERSIONS,
    "missing": [],
    "distributions": {"torch": "2.15.0"},
    "glibc": 36,
    "architecture": "x86_64",
    "runs": [],
    "toolkit": True,
    "gpus": NO_GPUS,
    "interfaces": {"192.0.2.1": "eno1"},
    "free_ports": [29500, 29501, 29502],
    "data": DATA,
    "disk_free": 1 << 40,
    "writable": True,
    "guard_python": True,
}


def facts(number, skew=0.0, **changes):
    """What node `number` answers, but for these parts of it."""
    answer = {**ANSWER, "machine": f"machine{number}", **changes}
    known = convert(answer, NodeFacts, "answer")
    return structs.replace(known, host=f"node{number}", skew=skew)


def problems(hosts, found, asked=None, control=None):
    """What is wrong with these machines, of whose answers and control node all else is well."""
    machines = OpenMachines(hosts, {}, {one.host: one for one in found})
    asked = asked or needs(model="resnet18")
    return judge.find_problems(machines, asked, control or ControlFacts(1 << 40))


def needs(config=None, decided=None, **options):
    """What a run of the trainer with these options needs of its machines."""
    config = config or Config()
    config = dataclasses.replace(config, trainer={**OPTIONS, **config.trainer, **options})
    return Needs(config, build_program(config), decided=decided or {})


def codes(problems):
    return [one.code for one in problems]


@contextlib.contextmanager
def refused(*wanted):
    """That what is done within is refused for problems with these codes."""
    with pytest.raises(Refused) as caught:
        yield
    assert codes(caught.value.reasons) == [*wanted], caught.value


def card(number=0, **changes):
    name = "NVIDIA GeForce RTX 2080 Ti"
    return {"name": name, "uuid": f"GPU-{number}a-b-c", "pci": "1e07", "sm": 75, **changes}


def gpus(count, **changes):
    cards = [card(number) for number in range(count)]
    return {**NO_GPUS, "cards": cards, "driver": "580.1", **changes}


def build(hosts, found, options=None, settings=None, **details):
    """The plan of an attempt; all that is `auto` is left to the ranks."""
    asked = needs(options, **(settings or {}))
    chosen = {"options": asked.config, "program": asked.program}
    known = {"run": "r", "unix": 0.0, "code": CODE, **chosen, **details}
    return making.build(hosts, {one.host: one for one in found}, making.PlanRequest(**known))


def planned(**options):
    """What RESUME reads of plan.json."""
    return {"options": document(make_config(options))}


def sent_to_trainer(node):
    """What a NodePlan gives the trainer."""
    return json.loads(node.argv[node.argv.index("--config") + 1])
