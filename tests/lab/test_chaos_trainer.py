"""Faults in runs of the real trainer, on three machines as site.yml makes them: the digits."""

import time
import uuid

import pytest

from tests.lab import chaos_trial
from tests.lab.chaos_run import PATIENCE
from tests.lab.chaos_trial import Trial
from tests.lab.site_plays import draw_digits, play, write_inventory, write_play

NODES, EPOCHS = 3, 2
FAULTS = [
    (chaos_trial.kill_controller, 1),
    (chaos_trial.kill_node_0, 1),
    (chaos_trial.kill_rank, 3),
    (chaos_trial.freeze_and_thaw, 2),
    (chaos_trial.full_disk, 2),
    (chaos_trial.lose_data, 2),
]
# What a fault takes for granted of its machine, and how that is taken back.
PREPARED = {
    chaos_trial.full_disk: (chaos_trial.small_disk, chaos_trial.no_small_disk),
    chaos_trial.lose_data: (chaos_trial.own_mount, chaos_trial.no_own_mount),
}


@pytest.fixture(scope="module")
def cluster(start_lab, tmp_path_factory, request):
    draw_digits()
    lab = start_lab("trainer", "--nodes", str(NODES), "--rate", "1gbit")
    addresses = {f"node{n}": f"ansible_host=192.168.56.{110 + n}" for n in range(1, NODES + 1)}
    folder = tmp_path_factory.mktemp("site")
    settings = ("-i", write_inventory(folder, addresses), "-e", "@group_vars/all.yml")
    # What a run needs of site.yml; as there, the first machine proves the environment.
    for hosts in ("node1", "cluster"):
        roles = write_play(folder, ["preflight", "python_env"], hosts, become=True)
        play(lab, *settings, roles)
    play(lab, *settings, write_play(folder, ["data"]))
    yield lab
    chaos_trial.print_figures(request.config)


@pytest.fixture
def trial(cluster, tmp_path, fault, node):
    value = uuid.uuid4().hex
    variables = f"""run_env='{{"TANDEM_TEST_MARK": "{value}"}}'"""
    hosts = {f"node{n}": f"ansible_host=192.168.56.{110 + n} {variables}" for n in (1, 2, 3)}
    # Not the default model, since a fault must hit the run while it trains.
    run = ("--model", "resnet18", "--epochs", str(EPOCHS))
    words = ("--inventory", write_inventory(tmp_path, hosts), *run)
    made = Trial(cluster, tmp_path, f"TANDEM_TEST_MARK={value}", NODES, node, words)
    prepare, take_back = PREPARED.get(fault, (None, None))
    if prepare:
        prepare(cluster, node)
    made.begin()
    wait_for_a_checkpoint(made)
    yield made
    made.close()
    if take_back:
        take_back(cluster, node)


def wait_for_a_checkpoint(trial):
    """Waits until the run has something to resume from, a third of its first epoch."""
    trial.run.wait_for("attempt 1: ")
    folder = f"tandem/runs/{trial.run.name}/checkpoints/node{NODES}"
    limit = time.monotonic() + PATIENCE
    while "step-" not in trial.lab.ssh(NODES, f"ls {folder} 2>/dev/null || true"):
        assert trial.run.process.poll() is None and time.monotonic() < limit, trial.run.said()
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("fault", "node"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_real_trainer_goes_on(trial, fault):
    trial.survive(fault, EPOCHS)
