"""Which of the unit tests `make test-unit` leaves out."""

import pytest

# Files that start ranks, guards, make or Ansible and wait for them. `make test` runs them beside
# the others; what takes longer than a second or two of a core belongs here.
PROCESSES = {
    "test_accept_filters.py",
    "test_data_lost.py",
    "test_data_workers.py",
    "test_guard_ends.py",
    "test_guard_recorders.py",
    "test_guard_run.py",
    "test_guard_wardens.py",
    "test_gpu_script.py",
    "test_imagenet.py",
    "test_launcher_validate.py",
    "test_launcher_connection.py",
    "test_launcher_engine.py",
    "test_launcher_probe.py",
    "test_launcher_run.py",
    "test_launcher_stalls.py",
    "test_models.py",
    "test_odd_checkpoints.py",
    "test_older_run.py",
    "test_one_process.py",
    "test_provision_bootstrap.py",
    "test_provision_clock.py",
    "test_provision_data.py",
    "test_provision_debs.py",
    "test_provision_site.py",
    "test_report_odd_files.py",
    "test_share_secret.py",
    "test_sync_carrier.py",
    "test_sync_ef.py",
    "test_sync_kills.py",
    "test_sync_local.py",
    "test_sync_machines.py",
    "test_sync_pairs.py",
    "test_sync_plain.py",
    "test_sync_resume.py",
    "test_trainer_exact.py",
    "test_trainer_finite.py",
    "test_trainer_process.py",
    "test_trainer_refusals.py",
    "test_trainer_results.py",
    "test_verbs.py",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in PROCESSES:
            item.add_marker(pytest.mark.processes)


@pytest.fixture(autouse=True)
def machines_of_no_other_test(monkeypatch):
    """What a test's verb was given as INVENTORY is not kept for the next one's commands."""
    monkeypatch.setenv("TANDEM_MACHINES", "")
