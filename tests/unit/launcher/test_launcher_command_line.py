"""The words a person types: unknown ones get the nearest, before anything starts."""

import pytest

from launcher import cli, options
from launcher.errors import UserError
from launcher.options import Options


def told(capsys, *words):
    code = cli.main(list(words))
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "--nodez", "3"], "tandem: unknown option --nodez. Did you mean --nodes?\n"),
        (["train", "--nodes", "three"], "--nodes: invalid int value: 'three'"),
        (["train", "--", "--epoch", "3"], "unknown option --epoch. Did you mean --epochs?"),
        (["train", "--sync", "alreduce"], "--sync alreduce: choose one of allreduce"),
        (["train", "resnet50"], "options of the trainer come after `--`"),
        (["status", "no-such-run"], "no run no-such-run"),
    ],
)
def test_bad_words_get_a_sentence(capsys, words, sentence):
    code, said = told(capsys, *words)
    assert code == 2
    assert sentence in said
    assert "Traceback" not in said


def test_only_what_was_given_changes_a_resumed_run():
    given = cli._parse(["train", "--resume", "latest", "--nodes", "3", "--", "--lr", "0.2"])
    assert cli._changes(given) == {"nodes": 3, "trainer": ("--lr", "0.2")}


def test_the_digits_have_a_recipe_and_what_was_typed_wins():
    recipe = Options().trainer_args()
    assert recipe[recipe.index("--epochs") + 1] == "16"
    assert recipe[recipe.index("--model") + 1] == "resnet18"
    assert Options(epochs=2).trainer_args() == [*recipe, "--epochs", "2"]
    assert Options(data="/mnt/x").trainer_args() == ["--model", "resnet18"]
    assert Options(model="resnet34").trainer_args() == ["--model", "resnet34"]


def test_recipes_become_flags(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 3\nlr: 1e-1\nsync_bn: true\nstep_epochs: [1, 2]\nweights: null\n")
    args = Options(epochs=5, trainer=("--seed", "1", f"--config={file}")).trainer_args()
    flags = ["--epochs", "3", "--lr", "1e-1", "--sync_bn", "true", "--step_epochs", "1,2"]
    assert args == [*flags, "--epochs", "5", "--seed", "1"]  # what was typed wins


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", None])
def test_a_broken_recipe_is_named(tmp_path, text):
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml"):
        Options(trainer=("--config", str(file))).trainer_args()


def test_the_trainer_says_what_it_will_do():
    settings = options.trainer_settings(Options(epochs=2, batch=48, precision="bf16"))
    assert (settings["epochs"], settings["per_node_batch_size"]) == (2, 48)
    assert settings["precision"] == "bf16"


def test_reading_the_trainers_options_needs_no_torch(monkeypatch):
    asked = "import sys; sys.modules['torch'] = None\n" + options._ASK_TRAINER
    monkeypatch.setattr(options, "_ASK_TRAINER", asked)
    assert options.trainer_settings(Options())["model"] == "resnet18"


def test_an_invalid_option_raises_the_trainers_sentence():
    with pytest.raises(UserError, match="must be at least 1"):
        options.trainer_settings(Options(batch=0))


def test_help_of_the_trainer_is_shown_and_nothing_begins(capfd):
    assert cli.main(["train", "--", "--help"]) == 0
    assert "--per_node_batch_size" in capfd.readouterr().out
