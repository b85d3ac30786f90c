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


@pytest.mark.parametrize(
    ("name", "batch", "steps", "rates"),
    [
        ("resnet18-digits", 128, 12, {1: 0.1}),  # four nodes of 32
        ("small_cnn-digits", 128, 12, {1: 0.4}),
        ("resnet50-imagenet-90", 256, 5004, {0: 0.1, 29: 0.1, 30: 0.01, 60: 0.001, 89: 0.001}),
    ],
)
def test_recipes_have_the_rates_that_they_are_known_for(name, batch, steps, rates):
    options = parse(["--config", str(FOLDER / f"{name}.yaml")])
    ours = {epoch: learning_rate(options, epoch * steps, steps, batch) for epoch in rates}
    assert ours == pytest.approx(rates)
