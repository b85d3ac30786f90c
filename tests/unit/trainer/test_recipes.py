"""The shipped recipes are options that exist; what is no recipe is refused in a sentence."""

from pathlib import Path

import pytest

from contract.command_line import parse, read_config
from contract.errors import UserError
from trainer.optim import learning_rate

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[3] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_whole(path):
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


LAUGHS = "\n".join([f"x{n}: &x{n} [{f'*x{n - 1}, ' * 9 if n else ''}a]" for n in range(12)])


@pytest.mark.parametrize(
    "text",
    [
        "epochs: " + "[" * 500,
        "epochs: 2001-13-99",
        "epochs: [[1]]",
        "data: " + "x" * 5000,
        LAUGHS.replace("x11:", "epochs:"),
        "epochs: 1\n? [a, b]\n: 1",
        "\ud800",
        "epochs: !!python/object:os.system x",
        "{",
    ],
    ids=lambda text: text[:12],
)
def test_a_file_that_is_no_recipe_is_one_sentence(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=r"recipe\.yaml: ") as raised:
        read_config(str(path))
    assert "\n" not in str(raised.value)


GOOD = {"epochs": 3, "step_epochs": [1, 2], "model": "resnet18", "ema": 0.9, "compile": True}
# An alias, too many parts, and too many bytes.
LONG = (LAUGHS.encode(), b"epochs: [" + b"1," * 2000 + b"1]", b"#" * 70_000)


@pytest.mark.hypothesis
def test_odd_recipes_are_taken_or_refused_in_a_sentence(tmp_path):
    pytest.importorskip("hypothesis")  # where the newest torch is tested
    from hypothesis import given
    from hypothesis import strategies as st

    from tests.fuzz import damaged, many, odd

    def written(document):
        return yaml.safe_dump(document, allow_unicode=True).encode(errors="replace")

    path, ends = tmp_path / "recipe.yaml", {"taken": 0, "refused": 0}

    @many(500)
    @given(odd(GOOD).map(written) | damaged(written(GOOD)) | st.sampled_from(LONG))
    def each(content):
        path.write_bytes(content)
        try:
            options = parse(["--config", str(path)])
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 5000
            ends["refused"] += 1
        else:
            assert isinstance(options.epochs, int) and options.epochs >= 0
            ends["taken"] += 1

    each()
    assert min(ends.values()) > 5, ends
