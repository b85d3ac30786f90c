"""What training tests share: images and, where several processes run them (--dist=loadscope),
which of them."""

import pytest

from tests.trainer_ranks import make_images

# Runs of the launcher wait for one another, since they have this machine's nodes, and each moves
# runs/latest.
GROUPS = dict.fromkeys(("test_train_demo.py", "test_train_script.py"), "runs")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadscope":
        return None  # beside other tests, or where there is one process
    from tests.by_group import ByGroup

    return ByGroup(config, log, GROUPS)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The folder of a data set that no test changes."""
    return make_images(tmp_path_factory.mktemp("images"), per_class=41)
