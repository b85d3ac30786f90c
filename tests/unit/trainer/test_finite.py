"""A run whose numbers are no longer finite ends on all ranks, and leaves what was good."""

from itertools import chain

import pytest
import torch

from contract.errors import BAD_INPUT, DIVERGED
from tandem.pickles import load_tensors
from tests.trainer_models import nan_in_every_evaluation, plain
from tests.trainer_ranks import lines, run_ranks, said, snapshot
from trainer import export

# Five steps an epoch on two ranks.
ARGS = ["--workers", 0, "--per_node_batch_size", 2, "--lr", 0.05, "--checkpoint_every", 1]


def run(images, output, model, *more, ranks=(1, 1), function=said):
    argv = ["--data", images, "--output", output, "--model", f"tests.trainer_models:{model}"]
    return run_ranks(list(ranks), function, *argv, *ARGS, *more)


def saved(output):
    """The steps of the checkpoints in the folder, all of them finite."""
    states = [load_tensors(p.open("rb")) for p in output.glob("checkpoints/*/*.pt")]
    for state in states:
        assert all(tensor.isfinite().all() for tensor in state["model"].values())
    return sorted({state["step"] for state in states})


@pytest.mark.parametrize("sync", ["allreduce", "ef:15"])
def test_a_loss_of_nan_ends_all_ranks_and_leaves_the_last_good_checkpoint(images, tmp_path, sync):
    more = ["--sync", sync, "--epochs", 3, "--sync_warmup", 0]
    (code, text), (other, silent) = run(images, tmp_path, "nan_from_pass_6", *more)
    assert (code, other) == (DIVERGED, DIVERGED)
    assert "the loss has been NaN since epoch 2, step 6:" in text
    assert (f"--sync {sync} rounds the gradients" in text) is (sync != "allreduce")
    assert (text.count("\n"), silent) == (1, "")
    assert saved(tmp_path)[-1] in (4, 5)
    assert {line["status"] for (line,) in lines(tmp_path, "end")} == {"failed"}


def test_nan_on_one_rank_alone_names_it(images, tmp_path):
    """The gradients are summed: one step later all have it, and the cause is told no more."""
    (code, text), (other, _) = run(images, tmp_path, "nan_once_on_rank_1", "--epochs", 3)
    assert (code, other) == (DIVERGED, DIVERGED)
    assert "since epoch 2, step 6, first on node2 (rank 1):" in text
    assert "bad images or faulty memory on node2" in text
    assert saved(tmp_path)[-1] == 5


def test_without_checkpoints_in_between_it_ends_at_the_next_log_point(images, tmp_path):
    more = ["--epochs", 9, "--checkpoint_every", 0, "--evaluate_every", 9, "--log_every", 4]
    (code, _), _ = run(images, tmp_path, "nan_from_pass_6", *more)
    assert code == DIVERGED
    steps = list(chain.from_iterable(lines(tmp_path, "step")))
    assert max(line["step"] for line in steps) <= 10
    assert [line["loss"] for line in steps if line["step"] == 8] == [None, None]


def under_a_loss_scale(*argv):
    """O1's loss scale, on a CPU and in fp32."""
    from contract import precisions
    from trainer import precision

    precisions.explain_lack = lambda *_: None
    precision.AUTOCAST_TYPES.pop("O1", None)
    return said(*argv, "--precision", "O1")


@pytest.mark.parametrize(
    ("model", "steps", "code"),
    [("overflowing", 1, 0), ("nan_in_two_passes", 3, 0), ("nan_in_two_passes", 2, DIVERGED)],
)
def test_steps_that_a_loss_scale_skips_are_no_divergence(images, tmp_path, model, steps, code):
    """A gradient that overflows leaves its loss finite; a loss that is not may be the next one."""
    more = ["--epochs", 4, "--nonfinite_steps", steps, "--log_every", 1]
    ends = run(images, tmp_path, model, *more, function=under_a_loss_scale)
    assert [end for end, _ in ends] == [code, code]


def test_an_evaluation_that_is_not_finite_is_not_the_best(images, tmp_path):
    """Five passes an epoch. Running statistics may need more time than the weights."""
    ends = run(images, tmp_path, "nan_in_first_evaluation", "--epochs", 2)
    assert [code for code, _ in ends] == [0, 0]
    losses = [line["loss"] for line in chain.from_iterable(lines(tmp_path, "evaluate"))]
    assert losses.count(None) == 2 < len(losses)
    best = load_tensors((tmp_path / "checkpoints/node1/best.pt").open("rb"))
    assert best["step"] == 10


def test_a_run_that_ends_without_a_finite_evaluation_has_failed(images, tmp_path):
    (code, text), _ = run(images, tmp_path, "nan_in_every_evaluation", "--epochs", 1)
    assert code == DIVERGED
    assert "epoch 1: the model's outputs on val are not finite" in text
    assert saved(tmp_path) == [4, 5]
    assert not list(tmp_path.glob("checkpoints/*/best.pt"))


@pytest.mark.parametrize("use", ["outputs", "predict", "train", "export"])
def test_weights_and_outputs_that_are_not_finite_are_refused(images, tmp_path, use, capsys):
    state = plain(4).state_dict()
    model = "nan_in_every_evaluation" if use == "outputs" else "plain"
    if use == "outputs":
        state = nan_in_every_evaluation(4).state_dict()
    else:
        state["0.weight"][0] = float("nan")
    name = tmp_path / "checkpoints/node1/step-00000001.pt"
    name.parent.mkdir(parents=True)
    torch.save(snapshot(model=state, classes=["a", "b", "c", "d"]), name)
    if use == "export":
        code = export.main([str(tmp_path), f"TO={tmp_path}/out.pt"])
        text = capsys.readouterr().err
    else:
        more = ["--epochs", 1] if use == "train" else ["--predict", tmp_path / "out.pt"]
        [(code, text)] = run(images, tmp_path, model, "--weights", name, *more, ranks=[1])
    assert (code, text.count("\n")) == (BAD_INPUT, 1)
    assert "not finite" in text
    assert not (tmp_path / "out.pt").exists()
