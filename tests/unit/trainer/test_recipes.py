"""The shipped recipes are options that exist."""

from pathlib import Path

import pytest

from trainer.cli import parse
from trainer.optim import learning_rate

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_whole(path):
    yaml = pytest.importorskip("yaml")
    options = parse(["--config", str(path)])
    for name, value in yaml.safe_load(path.read_text()).items():
        found = getattr(options, name)
        assert (list(found) if isinstance(found, tuple) else found) == value


def test_there_are_three():
    assert [path.stem for path in RECIPES] == [
        "resnet18-digits",
        "resnet50-imagenet-90",
        "resnet50-modern",
    ]


def test_the_digits_recipe_has_its_rate_at_four_nodes_of_32():
    options = parse(["--config", str(RECIPES[0])])
    assert learning_rate(options, 12, 12, 128) == pytest.approx(0.1)


def test_the_published_recipe_is_published_at_256():
    options = parse(["--config", str(RECIPES[1])])
    rates = [learning_rate(options, epoch * 5004, 5004, 256) for epoch in (0, 29, 30, 60, 89)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.001])
