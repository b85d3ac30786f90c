"""MODEL=: the file of a model of the user's, and what it imports, before any machine is asked."""

import pytest

from launcher import cli
from launcher.build_trainer import CHECKOUT, list_imports, model_folder, resolve_paths
from launcher.problems import NEVER
from tests.unit.launcher.launcher_values import codes, facts, host, needs, problems

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
    typed = {"model": "net.py:build"}
    resolve_paths(typed)
    assert typed["model"] == f"{mine}/net.py:build" and model_folder(typed["model"]) == mine
    # A file that is sent in any case is a module, so that it has one name however it was given.
    typed = {"model": f"{CHECKOUT}/examples/small_cnn.py:small_cnn"}
    resolve_paths(typed)
    assert typed["model"] == "examples.small_cnn:small_cnn" and model_folder(typed["model"]) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("net.py", "MODEL=net.py: name the function that returns the model, like MODEL="),
        ("nett.py:build", "there is no file"),
    ],
)
def test_a_path_that_leads_to_no_model_is_refused_before_anything_else(
    mine, monkeypatch, capsys, name, said
):
    monkeypatch.chdir(mine)
    assert cli.main(["train", "--model", name]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_what_a_model_imports_is_asked_of_every_machine_and_keeps_no_run_from_starting(mine):
    name = f"{mine}/net.py:build"
    assert list_imports(name) == ("numpy", "timm", "torch")
    assert list_imports("examples.own_backbone:small_resnet18") == ("torch", "torchvision")
    assert list_imports("resnet50") == ()
    asked, hosts = needs(model=name), [host(1), host(2)]
    assert problems(hosts, [facts(1), facts(2)], asked) == []
    (one,) = problems(hosts, [facts(n, missing=["timm"]) for n in (1, 2)], asked)
    assert codes([one]) == ["imports"] and one.blocks is NEVER
    assert one.text.startswith("node1 (192.0.2.1), node2")
