"""The shipped recipes are options that exist."""

from pathlib import Path

import pytest

from contract.command_line import parse
from trainer.optim import learning_rate

FOLDER = Path(__file__).parents[3] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_whole(path):
    yaml = pytest.importorskip("yaml")
    options = parse(["--config", str(path)])
    for name, value in yaml.safe_load(path.read_text()).items():
        found = getattr(options, name)
        assert (list(found) if isinstance(found, tuple) else found) == value


@pytest.mark.parametrize(("name", "rate"), [("resnet18-digits", 0.1), ("small_cnn-digits", 0.4)])
def test_recipes_for_the_digits_have_their_rate_at_four_nodes_of_32(name, rate):
    options = parse(["--config", str(FOLDER / f"{name}.yaml")])
    assert learning_rate(options, 12, 12, 128) == pytest.approx(rate)


def test_the_published_recipe_is_published_at_256():
    options = parse(["--config", str(FOLDER / "resnet50-imagenet-90.yaml")])
    rates = [learning_rate(options, epoch * 5004, 5004, 256) for epoch in (0, 29, 30, 60, 89)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.001])
