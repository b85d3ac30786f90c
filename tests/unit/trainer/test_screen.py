"""What people see: one rank speaks, a bar on a terminal, plain lines elsewhere, nothing twice."""

import logging
import re
import sys
import types
from unittest import mock

import pytest

from contract.options import Options
from trainer import screen as screens
from trainer.banner import describe_run
from trainer.evaluate import Result
from trainer.models import Cost
from trainer.screen import Screen, quiet_others
from trainer.world import World


@pytest.fixture
def time(monkeypatch):
    """A clock that stands still until it is moved."""
    now = types.SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(screens.time, "monotonic", lambda: now.seconds)
    return now


def screen(rank=0, **settings):
    options = Options(epochs=4, **settings)
    return Screen(
        options,
        World(rank=rank, size=2, batches=(4, 4)),
        steps=10,
        lines=types.SimpleNamespace(steps=9, step_seconds=4.5),
    )


def test_plain_lines_come_by_time_and_from_rank_0_alone(time, capsys, caplog):
    """Whatever a step takes: here 0.5 s, with a log point each 100 steps."""
    caplog.set_level(logging.INFO, logger="trainer")  # and back at the end
    for rank in (0, 1):
        quiet_others(World(rank=rank, size=2, batches=(4, 4)))
        wanted = logging.WARNING if rank else logging.INFO
        assert logging.getLogger("trainer").getEffectiveLevel() == wanted
        ours = screen(rank, progress="plain")
        ours.begin_epoch(0, 0)
        for step in range(1, 61):
            time.seconds += 0.5
            ours.count_step(images=5)
            if ours.is_due():
                ours.show_figures(step, remaining_images=7200, loss=1.5, top1=0.25)
        ours.show_evaluation(0, 1.25, 0.375, Result(99, 0.5, 0.9, 1.75), images=99)
        said = capsys.readouterr()
        assert said.err == ""
        figures = "loss 1.5000  top-1 25.00%  10 images/s  12:00 to go"
        lines = [f"epoch 1/4  step {step}  {figures}" for step in (4, 24, 44)]
        figures = "loss 1.250 top-1 37.50%  val 1.750 50.00%  10 images/s"
        lines.append(f"epoch 1/4  {figures}")
        assert said.out.splitlines() == (lines if rank == 0 else [])


def test_a_run_introduces_itself():
    world = mock.Mock(size=1, global_batch=8)
    job = mock.MagicMock(world=world, options=Options(), micro_batches=1, steps_per_epoch=1)
    size = job.train_set.__len__
    size.return_value = job.train_set.classes.__len__.return_value = 1
    first, *rest = describe_run(job, Cost(25_557_032, 2_468_352)).splitlines()
    assert "25.6 M parameters, 2.47 MFLOP an image of " in first
    assert rest[0].startswith("1 image of 1 class;")
    assert rest[1] == "1 step an epoch; batch 8 over 1 rank"
    size.return_value = 2000
    many = describe_run(job, Cost(640, None)).splitlines()
    assert "640 parameters, FLOPs unknown" in many[0] and many[1].startswith("2,000 images of 1")


def test_a_long_step_and_a_long_evaluation_are_not_silent(time, capsys):
    ours = screen(progress="plain")
    ours.print_if_silent()
    ours.begin_epoch(0, 0)
    for _ in range(44):  # one step
        time.seconds += 1
        ours.print_if_silent()
    ours.set_activity("evaluating: 3 of rank 0's 12 images")
    time.seconds += 15
    ours.print_if_silent()
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1/4  in step 1 of 10: 15 s since the last line",
        "epoch 1/4  in step 1 of 10: 30 s since the last line",
        "evaluating: 3 of rank 0's 12 images: 59 s since the last line",
    ]


@pytest.mark.parametrize(
    ("width", "wanted"),
    [
        (120, r"epoch 2/4  80%\|.{49}\| 00:\d\d, run 12:00, 10 images/s, loss 1.500, top-1 25.0%"),
        (40, r"epoch 2/4  80%\|.{18}\| 00:\d\d"),
    ],
)
def test_the_bar_is_whole_and_as_wide_as_the_terminal(time, capsys, monkeypatch, width, wanted):
    """The launcher gives COLUMNS, its label taken off: 80 columns leave some 69."""
    monkeypatch.setenv("COLUMNS", str(width))
    ours = screen(progress="bar")
    ours._lines = types.SimpleNamespace(steps=3, step_seconds=30.0)
    ours.begin_epoch(1, 4)
    for step in range(5, 9):
        time.seconds += 10
        ours.count_step(images=100)
        ours.show_figures(step, remaining_images=7200, loss=1.5, top1=0.25)
    ours._bar.refresh()
    shown = capsys.readouterr().err.split("\r")[-1].rstrip()
    # 10 images a second: 720 s for what is left of the run.
    assert re.fullmatch(wanted, shown), shown
    assert len(shown) == width
    ours.close()


def test_a_terminal_gets_the_bar_and_the_environment_may_decide(monkeypatch):
    monkeypatch.delenv("TANDEM_PROGRESS", raising=False)
    assert not screen()._with_bar
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert screen()._with_bar
    assert not screen(rank=1)._with_bar
    monkeypatch.setenv("TANDEM_PROGRESS", "plain")
    assert not screen()._with_bar
