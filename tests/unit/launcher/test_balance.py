"""BALANCE=: what it becomes, that it reaches the trainers, and that a run keeps it."""

import io
import json

import pytest

from contract.errors import UserError
from launcher import folders, look
from launcher.look import OpenMachines
from launcher.machines import inventory
from launcher.options import config_of
from launcher.plan import checks, plan, predictions
from launcher.plan.balance import decide
from launcher.run import weights_before
from launcher.terminal import Terminal
from tests.unit.launcher.launcher_values import facts, host, sent_to_trainer

HOSTS = [host(1), host(2), host(3)]
FACTS = {one.name: facts(number) for number, one in enumerate(HOSTS, 1)}
SPEEDS = {"node1": 100.0, "node2": 50.0, "node3": 99.0}


@pytest.mark.parametrize(
    ("speeds", "one_machine", "why"),
    [
        ({**SPEEDS, "node2": 91.0}, False, "the machines differ by 10%"),
        ({"node1": 100.0, "node3": 9.0}, False, "has measured node2"),
        ({}, False, "has measured node1, node2, node3"),
        (SPEEDS, True, "nodes of one machine"),
    ],
)
def test_parts_are_equal_where_speeds_are_or_are_not_known(speeds, one_machine, why):
    shared = {name: facts(1, machine="one") for name in FACTS}
    found = decide("auto", HOSTS, HOSTS, shared if one_machine else FACTS, lambda: speeds)
    assert found.of(HOSTS) == () and why in found.why


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("3:2", "has 2 numbers, and the run has 3 machines"),
        ("3:2:0", "numbers from 1"),
        ("3:2:9000000", "numbers from 1 to 1,000,000"),
        ("³:2:1", "give auto, off, or a number"),
        ("", "give auto, off, or a number"),
    ],
)
def test_what_is_no_division_is_refused_by_its_name(asked, said):
    with pytest.raises(UserError, match=said) as caught:
        decide(asked, HOSTS, HOSTS, FACTS, lambda: SPEEDS)
    assert f"BALANCE={asked}" in str(caught.value)


def test_parts_by_hand_and_none():
    by_hand = decide("3:2:1", HOSTS, HOSTS[1:], FACTS, lambda: SPEEDS)
    assert (by_hand.of(HOSTS), by_hand.of(HOSTS[1:])) == ((3, 2, 1), (2, 1))
    assert by_hand.of(HOSTS[:1]) == ()
    assert decide("off", HOSTS, HOSTS, FACTS, lambda: SPEEDS).of(HOSTS) == ()


@pytest.fixture
def ready(monkeypatch, tmp_path):
    """ready(**options) -> (what is prepared, what was said), on three machines whose speeds `make
    plan` knows."""
    monkeypatch.setattr(predictions, "own_speeds", lambda _settings, _hosts: SPEEDS)
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    monkeypatch.setattr(inventory, "load", lambda _path: HOSTS)
    monkeypatch.setattr(
        look, "open_and_probe", lambda hosts, *_, **__: OpenMachines(hosts, {}, FACTS)
    )
    monkeypatch.setattr(look, "unreachable_pairs", lambda *_: {})

    def make(before=None, **options):
        said = io.StringIO()
        options = config_of({"precision": "fp32", **options})
        checked = checks.check_machines(options, Terminal(said), before=before)
        checked.machines.close()
        return checked, said.getvalue()

    return make


def weights(made):
    return [sent_to_trainer(node).get("balance") for node in made.nodes]


def test_every_rank_is_told_the_same_parts_and_so_is_the_user(ready):
    checked, said = ready()
    made = checks.make_plan(checked, checked.machines, run="r")
    assert weights(made) == [[1000, 500, 990]] * 3
    assert "images a step: node1 39, node2 19, node3 38: as measured node1 is 2.0 x" in " ".join(
        said.replace("tandem: ", " ").split()
    )
    assert "balance 1000:500:990: as measured" in plan.render(made)
    assert json.loads(json.dumps(made.document()))["balance"] == dict(zip(FACTS, (1000, 500, 990)))


def test_without_one_machine_the_others_keep_their_weights(ready):
    checked, _ = ready()
    left = OpenMachines(HOSTS[1:], {}, FACTS)
    assert weights(checks.make_plan(checked, left, run="r", attempt=2)) == [[500, 990]] * 2


def test_equal_parts_are_said_to_nobody(ready):
    checked, said = ready(balance="off")
    made = checks.make_plan(checked, checked.machines, run="r")
    assert weights(made) == [None] * 3 and "images a step" not in said


def test_a_run_that_goes_on_has_the_same_parts_on_the_same_machines(ready):
    checked, _ = ready(before={"node1": 1, "node2": 1, "node3": 7})
    assert checked.workload.balance.of(HOSTS) == (1, 1, 7)
    assert not ready(before=dict.fromkeys(FACTS, 1))[0].workload.balance.weights  # equal ones, too
    joined = ready(before={"node1": 1, "node2": 1})[0]
    assert joined.workload.balance.of(HOSTS) == (1000, 500, 990)


def test_the_weights_of_the_last_attempt_are_found_again():
    last = {"nodes": ["node1", "node2"], "balance": {"node1": 3, "node2": 1}}
    first = {"nodes": ["node1"], "balance": {}}
    assert weights_before([first, last]) == {"node1": 3, "node2": 1}
    assert weights_before([last, first]) == {"node1": 1}
    assert weights_before([]) == {}
