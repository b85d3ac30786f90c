"""Which device the cases compute on, and what of them ran: `make test-gpu`, docs/gpu.md."""

import os
import re
import sys

import pytest
import torch

from tests.trainer_ranks import make_images

CPU = torch.device("cpu")
ALL, WITHOUT = pytest.StashKey[list](), pytest.StashKey[list]()
CARDS = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda")


def pytest_configure(config):
    config.addinivalue_line("markers", "needs_gpu: a CPU cannot show it")
    config.addinivalue_line("markers", "needs_torch_2: torch 1.12 has it not")
    # One card: what two ranks do that share it is tried. Only one case takes another one, too.
    config.stash[CARDS] = os.environ["TANDEM_TEST_CARDS"]
    os.environ["CUDA_VISIBLE_DEVICES"] = config.stash[CARDS].split(",")[0]
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"torch {torch.__version__} of {sys.executable} sees no GPU: see what nvidia-smi says, "
            "name another Python by PYTHON=<its path>, or run the cases that a CPU can: DEVICE=cpu."
        )


def pytest_collection_modifyitems(config, items):
    from tests.gpu.jobs import OLD  # not before it is known that this torch is one

    config.stash[ALL] = [item.nodeid for item in items]
    lacking = {"needs_gpu": config.getoption("--device") == "cpu", "needs_torch_2": OLD}
    missing = [name for name, lacks in lacking.items() if lacks]
    without = [item for item in items if any(map(item.get_closest_marker, missing))]
    if OLD:
        lost = "bf16|O[123]|test_waits" if lacking["needs_gpu"] else "bf16"
        without += [i for i in items if re.search(lost, i.nodeid) and i not in without]
    config.stash[WITHOUT] = [item.nodeid for item in without]
    items[:] = [item for item in items if item not in without]
    config.hook.pytest_deselected(items=without)


def pytest_terminal_summary(terminalreporter, config):
    say, stats = terminalreporter.write_line, terminalreporter.stats
    without, every = config.stash.get(WITHOUT, []), config.stash.get(ALL, [])
    device = config.getoption("--device")
    terminalreporter.section("cases")
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    passed, skipped = len(stats.get("passed", [])), stats.get("skipped", [])
    cases = f"{len(every)} cases" if every else "cases"  # several processes collect them unseen
    say(f"{cases} on {name}, torch {torch.__version__}: {passed} passed")
    for report in skipped:
        say(f"left out: {report.nodeid}: {report.longrepr[2]}")
    if without and not config.option.markexpr:
        newer = " or torch 2" * torch.__version__.startswith("1.")
        say("\n  ".join([f"needs a GPU{newer}: {len(without)} cases", *without]))


@pytest.fixture(scope="session")
def device(request):
    return torch.device("cuda", 0) if request.config.getoption("--device") == "cuda" else CPU


@pytest.fixture(scope="session")
def cards(request):
    """CUDA_VISIBLE_DEVICES with the first two cards, where there are two."""
    return ",".join(request.config.stash[CARDS].split(",")[:2])


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Generated images of 16 pixels in four classes: 44 to train on, 12 to evaluate on."""
    return make_images(tmp_path_factory.mktemp("images"), per_class=11)


@pytest.fixture
def without_apex(monkeypatch):
    """torch's own levels, also where apex is installed."""
    monkeypatch.setitem(sys.modules, "apex.amp", None)
