"""A model's name is checked before a run starts, without importing torch."""

import contextlib
import io
import sys

import pytest

from contract.errors import UserError
from contract.options import Options as TrainerOptions
from launcher import cli, judge
from launcher.look import Control, OpenMachines
from launcher.node import probe
from launcher.plan import models
from tests.unit.launcher.launcher_values import codes, facts, host

SENT = ("examples/own_backbone.py", "examples/digits.py", "trainer/train.py")


def problem(name, sent=SENT, imports=(), count=1, **changes):
    """What is wrong with a model of this name on machines that answer so."""
    hosts = [host(number) for number in range(1, count + 1)]
    known = {one.name: facts(number, **changes) for number, one in enumerate(hosts, 1)}
    control = Control(1 << 40, sent, imports)
    return [*judge.model(OpenMachines(hosts, {}, known), name, control)]


def told_here(argv):
    """What a Python would print that imports torchvision, as this one has: it takes seconds."""
    assert argv[:-1] == [sys.executable, "-IB", "-c"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(argv[-1], {})
    return printed.getvalue()


def test_the_names_are_those_that_the_trainer_knows(tmp_path, monkeypatch):
    import torchvision

    from trainer.classifiers import names

    rule = models.rule("resnet18")
    known = names(torchvision.models)
    assert {"resnet18", "vit_b_16"} < set(known)
    with monkeypatch.context() as patched:
        patched.setattr(probe, "output", told_here)
        assert probe.models(rule, str(tmp_path), "0.29") == known
    # Importing torchvision takes seconds: its answer is kept, as long as it is the same one.
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert probe.models(rule, str(tmp_path), "0.29") == known
    assert probe.models(rule, str(tmp_path), "0.30") == []
    assert probe.models(rule + "#", str(tmp_path), "0.29") == []


def test_a_machine_without_torchvision_is_not_asked_nor_for_a_function_of_ones_own(tmp_path):
    assert probe.models(models.rule("resnet18"), str(tmp_path), None) == []
    assert models.rule("examples.own_backbone:small_resnet18") is None
    assert probe.models(None, str(tmp_path), "0.29") == []


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("resnet34", []),
        ("resnet19", ["model-unknown"]),
        ("examples.own_backbone:small_resnet18", []),
        ("examples.own_bakbone:small_resnet18", ["model-nowhere"]),
        ("report.plan:predict", ["model-elsewhere"]),
    ],
)
def test_a_model_that_is_nowhere_is_refused(name, wanted):
    assert codes(problem(name, missing=["examples"])) == wanted


def test_without_torchvision_its_names_are_another_problem():
    assert problem("resnet19", models=[]) == []


def test_a_package_of_the_environment_is_left_to_the_trainer():
    assert problem("timm.models:resnet50d") == []
    assert codes(problem("timm.models:resnet50d", missing=["timm"])) == ["model-nowhere"]
    assert probe.has_package("json") and not probe.has_package("no_such_package")


NET = """
import json
import blocks
import timm.models
from torch import nn
try:
    import cv2
except ImportError:
    pass

def build(num_classes):
    import pandas
"""


@pytest.fixture
def mine(tmp_path):
    """A model and a module beside it, in a folder that has nothing to do with the checkout."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "blocks.py").write_text("import numpy, os.path\nfrom . import net\n")
    return tmp_path


def test_a_model_of_one_s_own_is_given_by_the_path_of_its_file(mine, monkeypatch):
    monkeypatch.chdir(mine)
    assert models.by_path("net.py:build") == f"{mine}/net.py:build"
    assert models.folder(f"{mine}/net.py:build") == mine
    # What is sent in any case is a module, so that it has one name however it was given.
    theirs = f"{models.CHECKOUT}/examples/small_cnn.py:small_cnn"
    assert models.by_path(theirs) == "examples.small_cnn:small_cnn"
    assert models.folder("examples.small_cnn:small_cnn") is None
    assert models.by_path("resnet50") == "resnet50"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("net.py", "MODEL=net.py: name the function that returns the model, like MODEL=net.py:bui"),
        ("net.py:bild", "net.py has no 'bild'; it has build"),
        ("examples.own_backbone:small_resnet81", "no 'small_resnet81'; it has small_resnet18"),
        ("nett.py:build", "there is no file"),
        ("broken.py:build", "broken.py, line 1"),
        ("odd.py:build", "odd.py cannot be read as Python"),
        ("deep.py:build", "it is nested too deeply"),
        ("large.py:build", "it has more than 256 KiB"),
        ("~nosuch/net.py:build", "MODEL=~nosuch/net.py:build is no path"),
    ],
)
def test_a_path_that_leads_to_no_model_is_refused_before_anything_else(
    mine, monkeypatch, capsys, name, said
):
    (mine / "broken.py").write_text("def f(:\n")
    (mine / "odd.py").write_bytes(b"# caf\xe9\n")
    (mine / "deep.py").write_text(f"x = {'-' * 200_000}1\n")
    with (mine / "large.py").open("wb") as file:
        file.truncate(3 << 30)
    monkeypatch.chdir(mine)
    assert cli.main(["train", "--model", name]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_what_a_model_imports_is_asked_of_every_machine(mine):
    name = f"{mine}/net.py:build"
    assert models.packages(name) == ["numpy", "timm", "torch"]
    assert models.packages("examples.own_backbone:small_resnet18") == ["torch", "torchvision"]
    assert models.packages("resnet50") == models.packages("timm.models:resnet50") == []
    imports = tuple(models.packages(name))
    assert problem(name, ("own/net.py",), imports) == []
    (one,) = problem(name, ("own/net.py",), imports, 2, missing=["timm"])
    assert one.code == "model-imports" and one.text.startswith("node1 (192.0.2.1), node2")
    assert "python -m pip install timm`" in one.text


def test_a_file_that_git_ignores_is_not_sent_and_that_is_said(mine):
    assert codes(problem(f"{mine}/net.py:build")) == ["model-not-sent"]


UNUSED = """
from torch import nn

class Body(nn.Sequential):
    def forward(self, images):
        return self[0](images).mean((2, 3))

def body():
    return Body(nn.Conv2d(3, 4, 3), nn.Linear(2, 2))
"""


@pytest.mark.long
def test_what_the_trial_of_a_model_finds_is_said_in_words_of_make(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/net.py").write_text(UNUSED)
    name = f"{tmp_path}/mine/net.py:body"
    local = host(1, connection="local", env_python=sys.executable)

    def outcome(**asked):
        trial = models.Trial.of(TrainerOptions(model=name), **asked)
        return trial.on(local.engine.node(local), str(tmp_path / "node"))

    with pytest.raises(UserError) as told:
        outcome(ranks_share=True)
    assert str(told.value).startswith(f"MODEL={name}: ") and "1.weight" in str(told.value)
    assert str(told.value).endswith("or give ARGS=--find_unused_parameters")
    assert outcome(ranks_share=False) == []
    assert [*tmp_path.glob("node/*")] == []  # nothing is left there
