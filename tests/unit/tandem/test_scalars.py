"""`timings.step(loss=...)`: what it records, and when that is read."""

import math

import numpy as np
import pytest
import torch

from contract.errors import UserError
from tandem import step_lines, timings
from tandem.clock import Clock
from tests.trainer_ranks import lines

CPU = torch.device("cpu")


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """loop(scalars of each step): times such steps, and returns their lines."""
    monkeypatch.setenv("TANDEM_OUTPUT", str(tmp_path))
    monkeypatch.setattr(timings, "_current", None)
    monkeypatch.setenv("RANK", "0")

    def run(steps):
        for _, scalars in zip(timings.timed([torch.zeros(3, 2)] * len(steps), model), steps):
            timings.step(**scalars)
        timings._current._end()
        return lines(tmp_path, "step")[0]

    model = torch.nn.Linear(2, 2)
    return run


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(2.5, requires_grad=True) * 1,
        torch.tensor([2.5], dtype=torch.bfloat16),
        np.float32(2.5),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_value_is_whatever_a_loop_has_at_hand(loop, value):
    first, *later = loop([{"loss": value, "steps_of_a_bar": 3, "absent": None}] * 3)
    assert first["scalars"] == {"loss": 2.5, "steps_of_a_bar": 3.0}
    assert later[-1]["scalars"]["loss"] == 2.5


def test_a_line_of_several_steps_has_their_mean_and_the_first_step_that_was_not_finite():
    block = step_lines.Block()
    block.size = 3
    written = [
        block.add({"step": step, "samples": 4, "seconds": {"forward": 0.2}}, {"loss": loss, "x": 2})
        for step, loss in enumerate([1.0, 2.0, 4.5, 3.0, math.inf, math.nan, 6.0, 6.0, 6.0], 1)
    ]
    found = [(line["scalars"]["loss"], line.get("not_finite")) for line in written if line]
    assert found == [(2.5, None), (None, {"loss": 5}), (6.0, None)]


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"samples": torch.tensor(0.25)}, "name a value .* step\\(loss=loss\\)"),
        ({"samples": torch.tensor(math.nan)}, "name a value .* step\\(loss=loss\\)"),
        ({"logits": torch.zeros(4, 10)}, "logits is a Tensor of shape \\(4, 10\\)"),
        ({f"s{number}": 0.0 for number in range(9)}, "s8 is one scalar too many"),
    ],
)
def test_what_is_not_one_of_eight_numbers_is_an_error_that_names_it(loop, scalars, message):
    with pytest.raises(UserError, match=message):
        loop([scalars])


class Coming:
    """A stand-in for scalars on their way from a GPU that is not the clock's."""

    arrived = False

    def have_arrived(self):
        return self.arrived

    def read(self):
        assert self.arrived
        return {"loss": 0.5}


def test_a_step_is_written_once_its_scalars_have_arrived(tmp_path, monkeypatch):
    written, coming = step_lines.Lines(str(tmp_path), "node1", 0, Clock(CPU)), Coming()
    monkeypatch.setattr(step_lines, "FLUSH_SECONDS", 0.0)
    written.add("step", scalars=coming, step=1, samples=4)
    written.flush_ready()
    assert lines(tmp_path) == [[]]
    coming.arrived = True
    written.flush_ready()
    assert lines(tmp_path)[0][0]["scalars"] == {"loss": 0.5}
