"""What to do: one model for all of it, what costs nothing first, with the command to type."""

import dataclasses
import json
import shlex

import pytest

from report.advice import Situation, advise, calibrated, loading, twice_the_batch, waiting
from report.analysis import analyse
from report.bottleneck import Seen
from report.page import render_page
from report.text import render_text
from tests.unit.report.report_runs import BOTTLENECKS, RunBuilder

SLOW = {"step": {"sync_exposed": 0.6}, "speed_mbit": 1000, "checkpoint": 30.0}
NOW = Situation(
    images=100, work=0.1, data=0.01, loader=0.0, network=0.5, peers=0.0, saving=0.2
)  # fmt: skip


def advised(tmp_path, **settings):
    """The analysis of a run that make started with `make train BATCH=32 ...`."""
    builder = RunBuilder(tmp_path / "run", **{"steps": 240, **settings})
    builder.write()
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    plan["options"] = {"batch": 32, "model": "resnet50", "data": "imagenet", "trainer": ["--lr=1"]}
    (tmp_path / "run/plan.json").write_text(json.dumps(plan))
    return analyse(tmp_path / "run")


def typed(item):
    """The variables of a command."""
    verb, *words = shlex.split(item["command"])[1:]
    assert verb == "train"
    return dict(word.split("=", 1) for word in words)


def test_remedies_of_different_parts_are_predicted_together(tmp_path):
    analysis = advised(tmp_path, **SLOW)
    *single, both = analysis.summary["advice"]
    assert both["change"].endswith(" together")
    best = max(item["predicted_images_per_second"] for item in single if not item["costs_money"])
    assert both["predicted_images_per_second"] > 1.03 * best
    words = typed(both)
    assert words["SYNC"].startswith(("ef:", "localsgd", "diloco", "bf16", "powersgd"))
    assert words["ARGS"] == "--lr=1 --checkpoint_every 240"
    assert {"NODES": "4", "MODEL": "resnet50", "DATA": "imagenet"}.items() <= words.items()


def test_what_costs_nothing_comes_first_with_its_command(tmp_path):
    analysis = advised(tmp_path, **BOTTLENECKS["network"])
    advice = analysis.summary["advice"]
    costs = [item["costs_money"] for item in advice]
    assert costs == sorted(costs)
    assert set(costs) == {True, False}
    assert typed(advice[0])["SYNC"] == analysis.advice.remedies[0].words["SYNC"]
    text = " ".join(render_text(analysis).split())
    assert text.index("VERDICT") < text.index("WHAT TO DO") < text.index("WHERE THE TIME WENT")
    assert "network cards and switch of 10 Gbit/s (costs money)" in text
    page = render_page(analysis)
    card = page[page.index('class="verdict') : page.index("Where the time went")]
    assert card.count('<span class="money">') == costs.count(True)
    assert f">{advice[0]['command']}</pre>" in card


def test_now_and_gains_are_of_one_model(tmp_path):
    """Where the rate was bounded, the formula's wait for this very run is not what was measured:
    half as many bytes then halve the wait that was measured."""
    step = advised(tmp_path, **BOTTLENECKS["network"]).step
    bounded = dataclasses.replace(step, rate=2 * step.rate)
    said = bounded.wait(step.strategy, step.nodes, bounded.rate)
    assert said < 0.6 * step.network
    assert calibrated(bounded, said) == pytest.approx(step.network)
    assert calibrated(bounded, said / 2) == pytest.approx(step.network / 2)
    now = advise(bounded, "network", {}, Seen()).now
    assert now == pytest.approx(step.images_per_second)


def test_a_step_waits_for_the_slower_of_loader_and_all_else():
    assert NOW.seconds == pytest.approx(0.81)
    late = Situation(images=100, work=0.1, data=0.0, loader=1.0, network=0.5, peers=0.0, saving=0.0)
    assert waiting(0.0)(late).seconds == 1.0  # a faster network is no use to a late loader
    assert loading(4)(late).seconds == pytest.approx(0.6)
    assert waiting(0.0)(loading(4)(late)).seconds == pytest.approx(0.25)
    assert twice_the_batch(NOW).images_per_second == pytest.approx(200 / 1.12)


def test_unlike_machines_are_told_what_parts_by_their_speeds_would_bring(tmp_path):
    analysis = advised(tmp_path, **BOTTLENECKS["straggler"])
    (balance,) = [item for item in analysis.summary["advice"] if "BALANCE" in item["change"]]
    assert typed(balance)["BALANCE"] == "auto"
    # Three machines need 0.128 s for 32 images and one 0.278 s; 10 ms are the network's.
    alone = 128 / (3 * 32 / 0.128 + 32 / 0.278)
    assert balance["predicted_images_per_second"] == pytest.approx(128 / (alone + 0.01), rel=0.02)


def test_a_demo_is_told_as_one_and_nothing_of_it_is_said_about_networks(tmp_path):
    analysis = advised(tmp_path, connection="local", **BOTTLENECKS["straggler"])
    assert "processes of one PC" in analysis.verdict.because[0]
    assert analysis.verdict.headline.startswith("One process holds up the others")
    assert analysis.summary["advice"] == []
    assert advise(analysis.step, "network", {}, Seen()).remedies == ()
    page = render_page(analysis)
    assert "processes of one PC" in page
    assert "<h2>Network</h2>" not in page


def test_a_report_says_what_unequal_parts_brought(tmp_path):
    """Of 128 images the slow machine got 16."""
    run = RunBuilder(tmp_path / "run", parts=[38, 38, 16, 36], **BOTTLENECKS["compute"]).write()
    analysis = analyse(run)
    text = " ".join(render_text(analysis).split())
    said = "Images of a step (BALANCE): node1 38, node2 38, node3 16, node4 36."
    assert said in text and said in render_page(analysis)
    # Each took 0.128 s for its own; node3 would have taken twice as long for 32.
    assert "slowest machine's took 0.13 s; with equal parts it would have taken 0.26 s" in text
