"""Eleven machines, so that names and ranks have two digits and one begins like another."""

import uuid

import pytest

from tests.lab import chaos_standin, chaos_trial
from tests.lab.chaos_trial import Trial

NODES, EPOCHS = 11, 6


@pytest.fixture
def trial(machines, tmp_path):
    mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
    file = chaos_standin.inventory(tmp_path, NODES, mark, step_seconds=0.5)
    words = ("--inventory", str(file), "--data", "d", "--epochs", str(EPOCHS))
    made = Trial(machines, tmp_path, mark, NODES, 10, words)
    made.begin()
    made.run.wait_for(r"\[node\d+ +\d+\] step 2\n", NODES)
    yield made
    made.close()


@pytest.mark.parametrize("fault", [chaos_trial.kill_rank, chaos_trial.kill_node])
def test_the_tenth_machine_is_named_and_the_run_goes_on(trial, fault):
    trial.survive(fault, EPOCHS)
    assert f"starting again: node{trial.node}" in trial.run.said()
