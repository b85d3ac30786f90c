"""A model's name is checked before a run starts, without importing torch."""

import contextlib
import io
import sys
from pathlib import Path

import pytest

from launcher.before import models
from launcher.probes import machine as probe
from tests.unit.launcher.launcher_values import facts, host

SENT = ("examples/own_backbone.py", "examples/digits.py", "trainer/train.py")


def problem(name, **changes):
    return models.problem(name, host(1), facts(1, **changes), SENT)


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


def test_names_of_torchvision():
    assert problem("resnet34") is None
    told = problem("resnet19")
    assert told.startswith("MODEL=resnet19: torchvision 0.29.2 on node1 has no such classifier; ")
    assert "nearest: resnet18" in told
    assert problem("resnet19", models=[]) is None  # no torchvision: said elsewhere


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("examples.own_backbone:small_resnet18", None),
        ("examples.own_backbone:small_resnet81", ["no 'small_resnet81'", "it has small_resnet18"]),
        ("examples.own_bakbone:small_resnet18", ["no", "nearest: examples.own_backbone"]),
        ("report.plan:predict", ["report/plan.py is not copied to the machines", "examples/"]),
    ],
)
def test_functions_of_ones_own(name, words):
    told = problem(name)
    assert (told is None) == (words is None), told
    for word in words or ():
        assert word in told


def test_a_package_of_the_environment_is_left_to_the_trainer():
    assert problem("timm.models:resnet50d", packages={"timm": True}) is None
    assert "a module timm.models" in problem("timm.models:resnet50d", packages={"timm": False})
    assert probe.has_package("json") and not probe.has_package("no_such_package")


def test_a_file_that_does_not_parse(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "CHECKOUT", tmp_path)
    Path(tmp_path, "examples").mkdir()
    Path(tmp_path, "examples/own_backbone.py").write_text("def f(:\n")
    assert "own_backbone.py, line 1" in problem("examples.own_backbone:f")
