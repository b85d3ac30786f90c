"""What training tests share: images, scripts of one's own and, where several processes run them
(--dist=loadscope), which of them."""

import pytest

from tests.train.script_runs import STARTED
from tests.trainer_ranks import make_images

# Runs of the launcher wait for one another, since they have this machine's nodes, and each moves
# runs/latest.
RUNS = (
    *("test_train_demo.py", "test_train_hangs.py", "test_train_known_scripts.py"),
    "test_train_owners.py",
    *("test_train_script.py", "test_train_script_shapes.py"),
)
GROUPS = dict.fromkeys(RUNS, "runs")


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


@pytest.fixture(autouse=True)
def no_run_outlives_its_test():
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()  # its guards end the rest by themselves


@pytest.fixture
def script(tmp_path):
    """script(source) -> the path of a script in a folder of its own."""

    def write(source):
        (tmp_path / "project").mkdir(exist_ok=True)
        path = tmp_path / "project/train.py"
        path.write_text(source)
        return path

    return write
