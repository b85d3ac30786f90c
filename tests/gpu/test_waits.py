"""Between two readings of the loss no step waits for the device; fp16's levels do so once."""

from contextlib import nullcontext

import pytest
import torch

from tandem import timings
from tests.gpu.jobs import batches, prepared, train, waits_within
from tests.trainer_ranks import lines

MUCH = {"mixup": 0.2, "cutmix": 1.0, "ema": 0.99, "accumulate": 2}
CASES = {
    "fp32": {"label_smoothing": 0.1, "checkpoint_activations": True},
    "clip": {"clip_grad_norm": 1.0, **MUCH},
    "adamw": {"optimizer": "adamw", "ema": 0.99},
    "bf16": {"precision": "bf16"},
    "bf16-all": {"precision": "bf16", "clip_grad_norm": 1.0, "channels_last": True, **MUCH},
    "O1": {"precision": "O1"},
    "O2": {"precision": "O2"},
    "O2-all": {"precision": "O2", **MUCH},
    "O3": {"precision": "O3"},
}
# The CPU's fused AdamW reads its steps.
MARKS = {"adamw": pytest.mark.needs_gpu}
MARKS.update(dict.fromkeys(("bf16-all", "O2-all"), pytest.mark.quick))
# Whether the gradients overflowed is read once a step, by the levels with a loss scale.
ALLOWED = {"O1": 1, "O2": 1, "O2-all": 1}
STEPS = 4


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_steps_do_not_wait_for_the_device(images, device, without_apex, name):
    job = prepared(images, device, **CASES[name])
    fed = batches(job, 3)
    train(job, fed[:4])  # what is made at first
    allowed = STEPS * ALLOWED.get(name, 0)
    with waits_within(device, raises=not allowed) as waits:
        train(job, fed[4 : 4 + STEPS], begin=4)
    assert len(waits) <= allowed, waits


def test_a_wait_is_seen(images, device):
    """What the cases above look with."""
    job = prepared(images, device)
    (loss,) = train(job, batches(job, 1, 1))
    with waits_within(device) as waits:
        float(loss)
    assert len(waits) == 1


@pytest.mark.needs_gpu
def test_a_batch_is_copied_from_pinned_memory(images, device):
    """From any other a copy is not asynchronous, which torch's debug mode does not see."""
    batch = batches(prepared(images, device), 1, 1)[0]
    assert batch.images.is_pinned()
    assert batch.targets.is_pinned()


def test_scalars_of_a_script_are_recorded_without_a_wait(device, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_OUTPUT", str(tmp_path))
    monkeypatch.setattr(timings, "_current", None)
    model = torch.nn.Linear(8, 1).to(device)
    batch = torch.ones(4, 8, device=device)
    for number, inputs in enumerate(timings.timed([batch] * 6, model)):
        loss = model(inputs).mean()
        # On a CPU its value is there, and is read at once.
        wait = waits_within(device, raises=True) if device.type == "cuda" else nullcontext()
        with wait if number else nullcontext():  # what is made at first
            timings.step(loss=loss * 0 + number)
    timings._current._end()
    (steps,) = lines(tmp_path, "step")
    assert sum(line["scalars"]["loss"] * line["steps"] for line in steps) == sum(range(6))
