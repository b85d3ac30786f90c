"""The words a person types: unknown ones get the nearest, before anything starts."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import UserError
from contract.options import DEFAULT_MODEL, Config
from launcher import cli, folders, run
from launcher.build_trainer import collect_trainer_options, read_settings
from launcher.machines.inventory import CHECKOUT
from launcher.options import document, new_config, read
from tests.unit.launcher.launcher_values import planned


def told(capsys, *words):
    code = cli.main(list(words))
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "--nodez", "3"], "tandem: unknown option --nodez. Did you mean --nodes?\n"),
        (["train", "--", "--epoch", "3"], "unknown option --epoch. Did you mean --epochs?"),
        (["train", "--", "--max_steps", "3"], "--max_steps. See `python -m trainer --help`."),
        (["train", "resnet50"], "options of the trainer come after `--`"),
        (["status", "no-such-run"], "no run no-such-run"),
    ],
)
def test_bad_words_get_a_sentence(capsys, words, sentence):
    code, said = told(capsys, *words)
    assert code == 2
    assert sentence in said
    assert "Traceback" not in said


def asked(*words):
    return new_config(cli.parse(["train", *words])[1])


def model_of(*words):
    return collect_trainer_options(asked(*words))["model"]


def test_the_small_network_is_for_runs_that_name_neither_model_nor_data():
    assert model_of() == DEFAULT_MODEL
    assert model_of("--epochs", "2", "--", "--lr", "1") == DEFAULT_MODEL
    assert model_of("--data", "digits") == model_of("--data", "/mnt/x") == "resnet18"
    assert model_of("--model", "resnet34") == "resnet34"


def test_a_recipe_and_the_trainers_own_words_may_name_a_model(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: resnet34\n")
    assert model_of("--", "--config", str(recipe)) == "resnet34"
    assert model_of("--", "--model=resnet50") == "resnet50"


def test_the_digits_have_recipes_and_what_was_typed_wins():
    model = DEFAULT_MODEL
    recipe = collect_trainer_options(Config(trainer={"model": model}))
    assert "warmup_epochs" in recipe and recipe["model"] == model and recipe["epochs"] > 2
    typed = Config(trainer={"model": model, "epochs": 2})
    assert collect_trainer_options(typed) == {**recipe, "epochs": 2}
    assert collect_trainer_options(replace(typed, data="/mnt/x")) == typed.trainer
    assert collect_trainer_options(Config(trainer={"model": "resnet34"})) == {"model": "resnet34"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("BATCH=0", "BATCH=0: must be at least 1."),
        ("--batch=0", "--batch 0: must be at least 1."),
        ("ARGS=--per_node_batch_size 0", "--per_node_batch_size 0: must be at least 1."),
        ("PRECISION=fp16", "O2, O3: O1 is fp16, with fp32 where it is needed."),
        ("ARGS=--predict /tmp/out.csv", "a name without a folder, such as out.csv."),
        ("ARGS=--extract ..", "ARGS='--extract ..': Tandem writes the file into runs/"),
        ("SYNC=ef:4:own", "SYNC=ef:LEVELS[:SCALE]: LEVELS is one of 3, 5, 15, 255, not '4'."),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_under_which_it_was_given(words, said):
    with pytest.raises(UserError) as caught:
        read_settings(asked(words))
    assert said in str(caught.value)


def test_help_of_the_trainer_is_shown_and_nothing_begins(capfd):
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--", "--help"])
    assert left.value.code == 0
    assert "--per_node_batch_size" in capfd.readouterr().out


def test_a_run_is_found_by_what_was_printed_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RUNS", tmp_path / "runs")
    with pytest.raises(UserError, match=r"^there is no run yet: `make demo` or `make train`"):
        folders.find("latest")
    run = tmp_path / "runs" / "20260101T000000Z-resnet18-4n"
    run.mkdir(parents=True)
    (run / "plan.json").touch()
    for name in (run.name, f"runs/{run.name}", f"runs/{run.name}/report.html", f"{run}/"):
        assert folders.find(name) == run
    with pytest.raises(UserError, match=f"has no run other: the newest runs are {run.name}"):
        folders.find("other")


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run that was stopped; any machine that is asked about it is an error."""
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    monkeypatch.setattr(run, "check_machines", lambda options, *_: sys.exit(str(options)))
    (tmp_path / "r").mkdir()
    asked = {"nodes": 4, "epochs": 60, "args": ["--lr", "0.4"]}
    plan = planned(sync="ef:15", **asked)
    plan["options"]["sync"] = "auto"
    (tmp_path / "r/plan.json").write_text(json.dumps(plan))
    (tmp_path / "r/attempts.json").write_text('{"status": "stopped", "attempts": []}')
    return tmp_path / "r"


@pytest.mark.parametrize(
    "words",
    [
        ["--epochs", "90", "--sync", "ef:15", "--precision", "auto"],
        ["--sync", "auto", "--max-restarts", "3"],
        ["--", "--workers", "2", "--lr", "0.4"],
    ],
)
def test_a_run_is_resumed_with_the_options_that_it_began_with(stopped, words):
    """Its ranks refuse those by which it would learn something else (tests/unit/trainer)."""
    with pytest.raises(SystemExit) as asked:
        cli.main(["train", "--resume", "r", *words])
    assert "'lr': 0.4" in str(asked.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_what_cannot_be_printed_is_said():
    with Path("/dev/full").open("w") as full:
        argv = [sys.executable, "-m", "launcher", "runs"]
        done = subprocess.run(argv, cwd=CHECKOUT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    said = "tandem: the output cannot be printed: No space left on device\n"
    assert done.stderr == said


def test_options_of_a_run_survive_plan_json():
    given = {"predict": None, "extract": "-o.csv", "trial": 1, "sync_bn": True, "ema": 0.5}
    given |= {"jpeg_scaling": False, "step_epochs": (30, 60), "model": "vgg11"}
    again = read(document(Config(trainer=given))).trainer
    assert again == {name: value for name, value in given.items() if value is not None}
