"""What is wrong with machines: each problem names the machine, the cause and the remedy."""

from dataclasses import replace

import pytest

from contract.errors import UserError
from contract.machines import CLOCK_TOLERANCE
from contract.options import Config
from launcher.plan import checks, preflight
from launcher.plan.preflight import OpenMachines
from launcher.plan.problems import Problem
from tests.unit.launcher.launcher_values import DATA, LISTING, SETTINGS, VERSIONS, facts, gpus, host


@pytest.fixture(autouse=True)
def mesh_is_whole(monkeypatch):
    """What machines reach each other is tests/unit/launcher/test_mesh.py's subject."""
    monkeypatch.setattr(preflight.probe, "check_ways", lambda *_: [])


def problems(*found, hosts=None, model="resnet18", run=None):
    hosts = hosts or [host(int(one.host[4:])) for one in found]
    asked = preflight.Requirements(Config(), replace(SETTINGS, model=model), run)
    return preflight.check(OpenMachines(hosts, {}, {one.host: one for one in found}), asked)


def test_nothing_wrong():
    assert problems(facts(1), facts(2)) == []


def versions(**changes):
    return {**VERSIONS, **changes}


@pytest.mark.parametrize(("off", "wrong"), [(-0.5, False), (1.5, True)])
def test_a_clock_is_wrong_for_a_run_where_it_is_wrong_for_make_check(off, wrong):
    """For make check: tests/unit/ansible/test_provision_clock.py."""
    now = facts(2).answered_unix + CLOCK_TOLERANCE
    found = problems(facts(1), facts(2, unix=now + off))
    assert ["its clock is" in problem.text for problem in found] == [True] * wrong


@pytest.mark.parametrize(
    ("images", "remedy"),
    [
        (64, None),
        (63, "give 31 or less."),
        (4, "give 2 or less."),
        (3, "add images, or take fewer machines."),  # a rank's batch has two at least
    ],
)
def test_a_batch_larger_than_the_data_is_refused(images, remedy):
    data = {**DATA, "splits": {"train": {**LISTING, "images": images}, "val": LISTING}}
    found = [one.text for one in problems(facts(1, data=data), facts(2, data=data))]
    said = f"BATCH=32 on 2 machines is 64 images a step, and train/ has {images}: {remedy}"
    assert found == ([said] if remedy else [])


def test_what_several_machines_have_in_common_is_said_once():
    missing = {"data": {**DATA, "path": "/d/nosuch", "exists": False, "others": ["digits", "mnt"]}}
    (problem,) = problems(facts(1, **missing), facts(2, **missing))
    begins = (
        "node1 (192.0.2.1), node2 (192.0.2.2): the data folder /d/nosuch is missing; there are "
    )
    assert problem.text.startswith(begins + "digits, mnt: correct DATA")
    assert "make" not in problem.text
    both = problems(facts(1, **missing), facts(2, **missing, writable=False))
    assert [one.text.partition(":")[0] for one in both][1:] == ["node2 (192.0.2.2)"]


def test_a_run_that_goes_on_does_not_stand_in_its_own_way():
    left = facts(1, runs=[{"pid": 7, "run": "r", "holder": "ann@desk"}], gpus=gpus(1, processes=[]))
    assert problems(left, run="r") == []
    assert problems(left, run="other")[0].busy


def test_a_model_that_is_not_there_is_told_once():
    (problem,) = problems(facts(1), facts(2), model="resnet19")
    assert problem.text.startswith("MODEL=resnet19: torchvision 0.29.2 on node1")
    assert problem.fatal


def test_versions_that_differ_are_both_named():
    (problem,) = problems(facts(1), facts(2, versions=versions(torch="2.14.1")), facts(3))
    assert "torch differs" in problem.text
    assert "2.15.0 (node1, node3), 2.14.1 (node2)" in problem.text


def test_force_passes_over_what_is_not_fatal():
    soft, hard = Problem("slow clock", fatal=False), Problem("no torch")
    assert preflight.refuse_or_warn([soft], force=True) == ["slow clock"]
    with pytest.raises(UserError, match="FORCE=1"):
        preflight.refuse_or_warn([soft], force=False)
    with pytest.raises(UserError, match="no torch"):
        preflight.refuse_or_warn([soft, hard], force=True)


def test_more_nodes_than_the_inventory_lists():
    hosts = [host(1), host(2)]
    with pytest.raises(UserError, match=r"NODES=3, but inventory.ini lists 2 \(node1, node2\)"):
        checks.select(hosts, Config(nodes=3))
    assert checks.select(hosts, Config(nodes=1)) == hosts[:1]
