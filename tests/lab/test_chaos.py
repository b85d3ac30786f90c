"""Faults one after the other: each is named in time, leaves nothing behind, and the run goes on.

The trainer is a stand-in that writes the same files, so that the machines' cores do not decide
(test_chaos_trainer.py has the real one). TANDEM_CHAOS_TRIALS sets how many trials there are; the
seed is fixed. TANDEM_CHAOS_WAY=service or =wardens takes sudo from the user that trains, and says
how its guards live.
"""

import os
import random
import uuid

import pytest

from tests.lab import chaos_standin, chaos_trial
from tests.lab.chaos_run import read
from tests.lab.chaos_trial import Trial

NODES, EPOCHS = 4, 4
TRIALS = int(os.environ.get("TANDEM_CHAOS_TRIALS", "8"))
WAY = os.environ.get("TANDEM_CHAOS_WAY")


@pytest.fixture(scope="module")
def machines(machines, request):
    for node in range(1, NODES + 1) if WAY else ():
        chaos_standin.take_sudo(machines, node, WAY)
    yield machines
    chaos_trial.print_figures(request.config)


FAULTS = [
    *(chaos_trial.kill_rank, chaos_trial.kill_controller, chaos_trial.kill_node),
    *(chaos_trial.freeze_and_thaw, chaos_trial.cut_and_mend, chaos_trial.stall_of_8_seconds),
    *(chaos_trial.full_disk, chaos_trial.oomd_kill, chaos_trial.kill_guard),
    *(chaos_trial.kill_launch, chaos_trial.kill_node_0, chaos_trial.leave_and_return),
]


def trials() -> list:
    """Each fault once in this order, then in random ones."""
    dice, order = random.Random(20260), [*FAULTS]
    while len(order) < TRIALS:
        order += dice.sample(FAULTS, len(FAULTS))
    return [(fault, dice.randint(1, NODES), dice.randint(3, 12)) for fault in order[:TRIALS]]


@pytest.fixture
def trial(machines, tmp_path, fault, node, step):
    mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
    # A machine that comes back boots while the others train.
    pace = 1.0 if fault is chaos_trial.leave_and_return else 0.3
    file = chaos_standin.inventory(tmp_path, NODES, mark, pace)
    words = ("--inventory", str(file), "--data", "d", "--epochs", str(EPOCHS))
    made = Trial(machines, tmp_path, mark, NODES, node, words)
    if fault is chaos_trial.full_disk:
        chaos_trial.small_disk(machines, node)
    made.begin()
    made.run.wait_for(rf"\[node\d \d\] step {step}\n", NODES)
    cgroup = read(made.run.pids(node)["guard"], "cgroup")
    assert ("/user@" in cgroup) == (WAY != "wardens")
    yield made
    made.close()
    if fault is chaos_trial.full_disk:
        chaos_trial.no_small_disk(machines, node)


@pytest.mark.parametrize(
    ("fault", "node", "step"), trials(), ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fault_is_named_leaves_nothing_and_the_run_goes_on(trial, fault):
    vain = trial.survive(fault, EPOCHS)
    # Of each attempt at most the steps since the last checkpoint, and the one under way.
    assert vain <= 6 * NODES * 4 * (len(trial.run.attempts()) - 1)
