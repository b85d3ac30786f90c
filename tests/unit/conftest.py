"""Which of the unit tests `make test-unit` leaves out."""

import pytest

# Files that start ranks, guards, make or Ansible and wait for them. `make test` runs them beside
# the others; what takes longer than a second or two of a core belongs here.
PROCESSES = {
    "ansible/test_accept_filters.py",
    "ansible/test_provision_bootstrap.py",
    "ansible/test_provision_clock.py",
    "ansible/test_provision_data.py",
    "ansible/test_provision_debs.py",
    "ansible/test_provision_site.py",
    "ansible/test_share_secret.py",
    "contract/test_older_run.py",
    "launcher/test_engine.py",
    "launcher/test_guard_ends.py",
    "launcher/test_guard_recorders.py",
    "launcher/test_guard_run.py",
    "launcher/test_guard_wardens.py",
    "launcher/test_probe.py",
    "launcher/test_run.py",
    "launcher/test_stalls.py",
    "launcher/test_validate.py",
    "report/test_odd_files.py",
    "tandem/test_attach.py",
    "tandem/test_standalone.py",
    "tools/test_gpu_script.py",
    "tools/test_imagenet.py",
    "tools/test_verbs.py",
    "trainer/test_data_lost.py",
    "trainer/test_data_workers.py",
    "trainer/test_exact.py",
    "trainer/test_finite.py",
    "trainer/test_models.py",
    "trainer/test_odd_checkpoints.py",
    "trainer/test_one_process.py",
    "trainer/test_process.py",
    "trainer/test_refusals.py",
    "trainer/test_results.py",
    "trainer/test_sync_carrier.py",
    "trainer/test_sync_ef.py",
    "trainer/test_sync_kills.py",
    "trainer/test_sync_machines.py",
    "trainer/test_sync_pairs.py",
    "trainer/test_sync_plain.py",
    "trainer/test_sync_resume.py",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if f"{item.path.parent.name}/{item.path.name}" in PROCESSES:
            item.add_marker(pytest.mark.processes)


@pytest.fixture(autouse=True)
def machines_of_no_other_test(monkeypatch):
    """What a test's verb was given as INVENTORY is not kept for the next one's commands."""
    monkeypatch.setenv("TANDEM_MACHINES", "")
