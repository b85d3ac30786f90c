"""The words a person types: unknown ones get the nearest, before anything starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import UserError
from contract.options import DEFAULT_MODEL
from contract.options import Options as TrainerOptions
from contract.runs import run_id
from launcher import cli, folders, options, run, slurm
from launcher.machines.engine import Host
from launcher.machines.inventory import CHECKOUT
from launcher.options import Options
from tests.unit.launcher.launcher_values import planned


def told(capsys, *words):
    code = cli.main(list(words))
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "--nodez", "3"], "tandem: unknown option --nodez. Did you mean --nodes?\n"),
        (["train", "--nodes", "three"], "--nodes: invalid int value: 'three'"),
        (["train", "--", "--epoch", "3"], "unknown option --epoch. Did you mean --epochs?"),
        (["train", "--", "--max_steps", "3"], "--max_steps. See python -m trainer --help."),
        (["train", "--sync", "alreduce"], "SYNC=alreduce: choose one of allreduce"),
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
    assert cli._changes(given) == {"nodes": 3, "trainer": ["--lr", "0.2"]}


def asked(*words):
    return cli._new(cli._parse(["train", *words]))


def model_of(*words):
    args = asked(*words).trainer_args()
    return args[args.index("--model") + 1] if "--model" in args else None


def test_the_small_network_is_for_runs_that_name_neither_model_nor_data():
    assert model_of() == DEFAULT_MODEL
    assert model_of("--epochs", "2", "--", "--lr", "1") == DEFAULT_MODEL
    assert model_of("--data", "digits") == model_of("--data", "/mnt/x") == "resnet18"
    assert model_of("--model", "resnet34") == "resnet34"


def test_a_recipe_and_the_trainers_own_words_may_name_a_model(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: resnet34\n")
    assert model_of("--", "--config", str(recipe)) == "resnet34"
    words = asked("--", "--model=resnet50").trainer_args()
    assert DEFAULT_MODEL not in words and words[-1] == "--model=resnet50"


def test_verbs_share_their_defaults():
    for verb in ("dry-run", "slurm"):
        assert cli._new(cli._parse([verb])) == asked()


def test_a_run_that_is_resumed_keeps_the_model_that_it_began_with():
    """Whatever the default is by then; older plans name no model, and mean resnet18."""
    assert asked().model == DEFAULT_MODEL
    assert Options(model=None, data="digits").trainer_args()[:2] == ["--model", "resnet18"]


@pytest.mark.parametrize("model", [DEFAULT_MODEL, "resnet18"])
def test_the_digits_have_recipes_and_what_was_typed_wins(model):
    recipe = Options(model=model).trainer_args()
    assert "--warmup_epochs" in recipe and recipe[recipe.index("--model") + 1] == model
    assert Options(variables={"epochs": 2}, model=model).trainer_args() == [
        *recipe,
        "--epochs",
        "2",
    ]
    assert Options(model=model, data="/mnt/x").trainer_args() == ["--model", model]
    assert Options(model="resnet34").trainer_args() == ["--model", "resnet34"]


def test_recipes_become_flags(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 3\nlr: 1e-1\nsync_bn: true\nstep_epochs: [1, 2]\nweights: null\n")
    args = Options(
        variables={"epochs": 5}, trainer=("--seed", "1", f"--config={file}")
    ).trainer_args()
    flags = ["--epochs", "3", "--lr", "1e-1", "--sync_bn", "true", "--step_epochs", "1,2"]
    assert args == [*flags, "--epochs", "5", "--seed", "1"]  # what was typed wins


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "epoch: 3\n", None])
def test_a_broken_recipe_is_named(tmp_path, text):
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml"):
        Options(trainer=("--config", str(file))).trainer_args()


def test_the_trainer_says_what_it_will_do():
    settings = options.trainer_settings(
        Options(variables={"epochs": 2, "batch": 48, "precision": "bf16"})
    )
    assert (settings.epochs, settings.per_node_batch_size) == (2, 48)
    assert settings.precision == "bf16"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Options(variables={"batch": 0}), "BATCH=0: must be at least 1."),
        (Options(trainer=("--per_node_batch_size", "0")), "--per_node_batch_size 0: must be at"),
        (Options(trainer=("--lr", "nan")), "--lr nan: must be a number."),
        (Options(trainer=("--lr", "inf")), "--lr inf: must be a number."),
        (
            Options(variables={"precision": "fp16"}),
            "O2, O3: O1 is fp16, with fp32 where it is needed.",
        ),
        (Options(variables={"epochs": 0}), "EPOCHS=0: must be at least 1."),
    ],
)
def test_an_invalid_option_raises_the_trainers_sentence_in_words_of_make(given, said):
    with pytest.raises(UserError) as caught:
        options.trainer_settings(given)
    assert said in str(caught.value)
    assert given.trainer or "--" not in str(caught.value)


def test_help_of_the_trainer_is_shown_and_nothing_begins(capfd):
    assert cli.main(["train", "--", "--help"]) == 0
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
    with pytest.raises(UserError, match=f"no run other in .*: the newest are {run.name}"):
        folders.find("other")


def test_a_line_break_in_a_model_is_no_line_of_the_slurm_script():
    settings = TrainerOptions(model="a\n#SBATCH --partition=x")
    host = Host("node1", "ssh", "10.0.0.1", 22, None, "python", "tandem", "/data")
    name = run_id(settings.model, 2, 0.0)
    text = slurm.script(Options(nodes=2, model=settings.model), settings, host, name)
    head = text.split("set -euo pipefail")[0]
    assert "--partition=x" not in head


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("plan.json", '{"options": {', "it is no JSON"),
        ("plan.json", "[]", "it is []"),
        ("attempts.json", "", "it is no JSON"),
    ],
)
def test_a_run_whose_records_are_damaged_does_not_go_on(
    capsys, tmp_path, monkeypatch, file, text, why
):
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    (tmp_path / "r").mkdir()
    (tmp_path / "r/plan.json").write_text(json.dumps(planned()))
    (tmp_path / "r" / file).write_text(text)
    code, said = told(capsys, "train", "--resume", "r")
    assert code == 2 and len(said.splitlines()) == 1
    assert f"{file} is damaged ({why}" in said and "start a new one" in said


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run that was stopped; any machine that is asked about it is an error."""
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    monkeypatch.setattr(run, "check_machines", lambda options, *_: sys.exit(str(options)))
    (tmp_path / "r").mkdir()
    asked = {"nodes": 4, "epochs": 60, "trainer": ["--lr", "0.4"]}
    plan = planned(sync="ef:4", **asked)
    plan["options"]["sync"] = "auto"
    (tmp_path / "r/plan.json").write_text(json.dumps(plan))
    (tmp_path / "r/attempts.json").write_text('{"status": "stopped", "attempts": []}')
    return tmp_path / "r"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", "30"], "leave out EPOCHS=30 (the run has 60), or start"),
        (["--", "--lr", "0.5"], "leave out ARGS='--lr 0.5' (the run has 0.4), or start"),
        (["--batch", "8", "--", "--sync_bn"], "BATCH=8 (the run has 32) and ARGS='--sync_bn True'"),
        (["--sync", "allreduce"], "leave out SYNC=allreduce (the run has ef:4)"),
        (["--model", "resnet50"], "leave out MODEL=resnet50 (the run has resnet18)"),
        (["--data", "imagenet"], "leave out DATA=imagenet (the run has digits), or start"),
        (["--precision", "bf16"], "leave out PRECISION=bf16 (the run has fp32)"),
    ],
)
def test_a_run_is_not_resumed_with_options_by_which_it_would_learn_otherwise(
    stopped, capsys, words, said
):
    before = {path: path.read_text() for path in stopped.iterdir()}
    code, told_now = told(capsys, "train", "--resume", "r", *words)
    assert code == 2
    assert said in told_now
    assert "may have other machines (NODES" in told_now
    assert {path: path.read_text() for path in stopped.iterdir()} == before


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "2"],
        ["--epochs", "60", "--sync", "ef:4", "--precision", "auto"],
        ["--sync", "auto", "--max-restarts", "3"],
        ["--", "--workers", "2", "--lr", "0.4"],
    ],
)
def test_a_run_is_resumed_with_what_computes_the_same(stopped, words):
    with pytest.raises(SystemExit) as asked:
        cli.main(["train", "--resume", "r", *words])
    # What was given to the trainer before is kept.
    assert "'--lr', '0.4'" in str(asked.value)
    assert "'sync': 'ef:4'" in str(asked.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_what_cannot_be_printed_is_said():
    with Path("/dev/full").open("w") as full:
        argv = [sys.executable, "-m", "launcher", "runs"]
        done = subprocess.run(argv, cwd=CHECKOUT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    said = "tandem: the output cannot be printed: No space left on device\n"
    assert done.stderr == said
