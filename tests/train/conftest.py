"""Which training tests share a process where several run them (--dist=loadscope)."""

import pytest

# Runs of the launcher wait for one another, since they have this machine's nodes, and each moves
# runs/latest.
GROUPS = dict.fromkeys(("test_train_demo.py", "test_train_script.py"), "runs")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadscope":
        return None  # beside other tests, or where there is one process
    from tests.by_group import ByGroup

    return ByGroup(config, log, GROUPS)
