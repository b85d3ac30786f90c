"""The CUDA 10.2 stack (torch 1.12.1, Python 3.9) on Debian 11: the trainer there, and whole runs.

`make test-lab ONLY=test_legacy.py` runs this file alone and shows what the machine prints.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests import run_directory
from tests.lab.site_plays import gather_bundle, play
from tests.trainer_models import plain
from tests.trainer_ranks import make_images

CHECKOUT = Path(__file__).resolve().parents[2]
ENV = "/opt/tandem/env/bin/python"
# What the trainer's tests need on the machine, relative to the checkout.
TESTED = (
    *("trainer", "tandem", "contract", "tests", "recipes", "examples", "docs", "pyproject.toml"),
)
# Files that take more than half of the time, and call what others call, too: `make test-all` has
# them run here.
LATER = [
    *("tests/unit/trainer/test_sync_scales.py", "tests/unit/trainer/test_sync_ef.py"),
    *("tests/unit/trainer/test_sync_machines.py", "tests/unit/trainer/test_refusals.py"),
    *("tests/unit/trainer/test_results.py", "tests/unit/trainer/test_data_folder.py"),
    *("tests/unit/trainer/test_data_lost.py", "tests/unit/tandem/test_attach_life.py"),
    *("tests/unit/trainer/test_finite.py", "tests/unit/trainer/test_more_epochs.py"),
    *("tests/unit/trainer/test_entropy.py", "tests/unit/trainer/test_trial.py"),
    *("tests/unit/trainer/test_detector.py", "tests/unit/tandem/test_standalone.py"),
]
OTHERS = ["tests/unit/tandem", "tests/unit/trainer", *(f"--ignore={file}" for file in LATER)]
STEPS = 20
BATCH = 8


def gather_pytest(folder: Path) -> None:
    """Wheels for Python 3.9, fetched here since the lab has no way out."""
    tags = [f"--platform=manylinux{tag}_x86_64" for tag in ("2014", "_2_17", "_2_28")]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
            *("--only-binary=:all:", "--python-version=3.9", *tags, f"--dest={folder}"),
            f"--requirement={CHECKOUT / 'requirements/legacy.txt'}",
        ],
        check=True,
    )


@pytest.fixture(scope="module")
def legacy(start_lab):
    """Three machines of Debian 11 that site.yml has given the cu102 stack."""
    gather_bundle("cu102", "3.9")
    lab = start_lab("legacy", "--nodes", "3", "--release", "bullseye", "--no-bundle")
    play(lab, "site.yml", "-e", "stack=cu102")
    return lab


@pytest.fixture(scope="module")
def node1(legacy, tmp_path_factory):
    """The first machine with the trainer, its tests and pytest in the run user's home."""
    wheels = tmp_path_factory.mktemp("wheels")
    gather_pytest(wheels)
    files = [str(CHECKOUT / name) for name in TESTED]
    target = "tandem@192.168.56.111:"
    legacy.control("rsync", "--recursive", "--exclude=__pycache__", *files, f"{target}checkout/")
    legacy.control("rsync", "--recursive", f"{wheels}/", f"{target}wheels/")
    install = "-m pip install --quiet --no-index --no-deps --target pytest wheels/*.whl"
    legacy.ssh(1, f"{ENV} {install}")
    return lambda line: legacy.ssh(1, f"cd checkout && PYTHONPATH=../pytest:. {line}")


@pytest.mark.parametrize("files", [OTHERS, pytest.param(LATER, marks=pytest.mark.long)])
def test_the_trainer_passes_its_own_tests(node1, capsys, files):
    show = "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)"
    printed = node1(f'{ENV} -c "{show}"')
    assert "torch 1.12.1" in printed
    options = "--quiet -p no:cacheprovider --import-mode=importlib -m 'not long' -n 2"
    # A failed test ends the ssh command with pytest's code, and the fixture shows all it printed.
    printed += node1(f"OMP_NUM_THREADS=1 {ENV} -m pytest {options} {' '.join(files)}")
    with capsys.disabled():
        print(f"\n{printed}")
    assert re.search(r"^\d+ passed", printed, re.M)


def test_the_table_names_the_newest_gcc_that_this_torch_takes(node1):
    """Its own bound, the first version that is too new, is what keeps gcc 8.4 out (stacks.yml)."""
    where = f"$({ENV} -c 'import torch.utils; print(torch.utils.__path__[0])')/cpp_extension.py"
    (bound,) = re.findall(
        r"'10.2': \(MINIMUM_GCC_VERSION, \((\d+), 0, 0\)\)", node1(f"cat {where}")
    )
    table = yaml.safe_load((CHECKOUT / "ansible/stacks.yml").read_text())["stacks"]
    assert table["rows"]["cu102"]["gcc"] == int(bound) - 1


@pytest.fixture(scope="module")
def beginning(tmp_path_factory):
    """A folder with images that need no scaling, and the weights to begin with."""
    folder = tmp_path_factory.mktemp("beginning")
    make_images(folder / "images", per_class=STEPS * BATCH // 4, classes=4)
    torch.manual_seed(0)
    torch.save(plain(4).state_dict(), folder / "weights.pt")
    return folder


def steps(python: str, folder: str) -> list[str]:
    """Command lines: 20 steps in fp64 from the given weights, then the plain weights in a file."""
    options = f"--data {folder}/images --weights {folder}/weights.pt --output {folder}/output"
    exact = f"--precision fp64 --augment none --epochs 1 --per_node_batch_size {BATCH}"
    model = "--model tests.trainer_models:plain --warmup_epochs 0 --workers 0"
    return [
        f"{python} -m trainer {options} {exact} {model}",
        f"{python} -m trainer.export {folder}/output TO={folder}/after.pt",
    ]


def test_twenty_steps_are_those_of_the_newest_torch(legacy, node1, beginning):
    address = "tandem@192.168.56.111"
    legacy.control("rsync", "--recursive", f"{beginning}/", f"{address}:beginning/")
    for line in steps(ENV, "../beginning"):
        node1(line)
    legacy.control("rsync", f"{address}:beginning/after.pt", f"{beginning}/legacy.pt")
    for line in steps(sys.executable, str(beginning)):
        subprocess.run(line.split(), cwd=CHECKOUT, check=True)
    before, newest, old = (
        torch.load(beginning / f"{name}.pt", weights_only=True)
        for name in ("weights", "after", "legacy")
    )
    for key, value in newest.items():
        scale = value.abs().max()
        assert (old[key] - value).abs().max() < 1e-4 * scale
        assert (before[key] - value).abs().max() > 1e-2 * scale, "it did train"


def run_of(printed: str) -> Path:
    """The folder of a finished run, by what it printed. (runs/latest may be another test's.)"""
    print(printed)
    (name,) = re.findall(r"^tandem: everything is in (runs/\S+)$", printed, re.M)
    return CHECKOUT / name


def finished(run: Path) -> dict:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert run_directory.problems(run) == []
    return summary


def test_three_machines_train_as_well_as_the_newest_torch(legacy):
    old = run_of(legacy.control("make", "train", "NODES=3").stdout)
    assert (old / "report.html").is_file()
    assert set(versions(old)) == {"1.12.1"}
    launch = [sys.executable, "-m", "launcher", "train", "--inventory", "examples/demo.ini"]
    launch += ["--nodes", "3", "--queue"]  # somebody may try `make demo` on this machine
    done = subprocess.run(launch, cwd=CHECKOUT, check=True, stdout=subprocess.PIPE, text=True)
    newest = run_of(done.stdout)
    assert set(versions(newest)) == {torch.__version__.split("+")[0]}
    assert abs(finished(old)["final_top1"] - finished(newest)["final_top1"]) <= 0.01


def versions(run: Path) -> list[str]:
    """torch of each node, by the plan."""
    plan = json.loads((run / "plan.json").read_text())
    return [node["versions"]["torch"].split("+")[0] for node in plan["nodes"]]
