"""Predictions: the formulas against what was measured, and `python -m report plan`."""

import json
import re

import pytest

from contract import prices
from contract.runs import prediction_path, run_id
from contract.strategies import Payload, Phases, list_usual, parse
from launcher import cli
from launcher.options import new_config
from report import formulas, published_speeds
from report.__main__ import main
from report.analysis import analyse
from report.measurements import basis_on_paper as paper
from report.measurements import read_basis
from report.predict import fastest, predict
from report.reading import Reading
from tests.unit.report.report_runs import GRADIENTS, STEP, RunBuilder

# Measured over links shaped to 1 Gbit/s: ResNet-50's gradients, four ranks on two cores. A step
# without communication took 0.26 s, two thirds of it backward.
WORK, BACKWARD = 0.26, 0.26 * 2 / 3
GIGABIT = formulas.goodput(1000)
PAYLOAD = Payload(GRADIENTS)


@pytest.mark.parametrize(("sync", "measured"), [("allreduce", 1.41), ("fp16", 0.73)])
def test_step_over_a_slow_link_agrees_with_the_measured_one(sync, measured):
    step = WORK + formulas.sync_wait(parse(sync), 4, PAYLOAD, GIGABIT, BACKWARD)
    assert step == pytest.approx(measured, rel=0.05)


def test_the_size_of_the_buckets_reaches_the_prediction(tmp_path):
    speeds = {}
    for size in (1, 25):
        run = RunBuilder(tmp_path / f"run{size}", bucket_mb=size).write()
        speeds[size] = analyse(run).step.wait(parse("bf16"), 4, 1e10)
    assert 0 < speeds[1] < speeds[25] / 20


def plan(tmp_path, capsys, *words):
    code = main(["plan", "--runs", str(tmp_path), "--model", "resnet50", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def on_paper(capsys, *words):
    given = ["--gpu", "2080ti", "--link", "1gbit", "--precision", "fp32"]
    assert main(["plan", *given, *words]) == 0
    return capsys.readouterr().out


def test_plan_from_one_node_tells_the_truth_about_four(tmp_path, capsys):
    step = {"sync_exposed": 0.0}
    RunBuilder(tmp_path / "20261120T120000Z-resnet50-1n", nodes=1, sent=0.0, step=step).write()
    code, out, _ = plan(tmp_path, capsys, "--sync", "bf16")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    document = json.loads((tmp_path / "plan-resnet50-4n.json").read_text())
    assert document["sync"] == "bf16"
    waited = formulas.sync_wait(parse("bf16"), 4, PAYLOAD, GIGABIT, 0.08)
    assert document["images_per_second"] == pytest.approx(128 / (0.128 + waited), rel=1e-3)
    assert {(row["nodes"], row["sync"]) for row in document["rows"]} == {
        (1, "allreduce"),
        *((n, strategy.spec) for n in (2, 3, 4) for strategy in list_usual()),
    }


def test_plan_takes_the_newest_run_that_measured_a_step(tmp_path, capsys):
    RunBuilder(tmp_path / "20261120T120000Z-resnet50-2n", nodes=2).write()
    (tmp_path / "20261120T130000Z-resnet50-2n/nodes").mkdir(parents=True)
    RunBuilder(tmp_path / "20261120T140000Z-vgg16-2n", nodes=2, model="vgg16").write()
    assert plan(tmp_path, capsys, "--nodes", "2")[0] == 0
    found = json.loads((tmp_path / "plan-resnet50-2n.json").read_text())
    assert found["from_run"] == "20261120T120000Z-resnet50-2n"


def test_plan_without_a_model_is_for_what_make_train_starts_without_one(tmp_path, capsys):
    default = new_config({}).trainer["model"]
    run = run_id(default, 4, 1.7e9)
    RunBuilder(tmp_path / run, model=default).write()
    assert main(["plan", "--runs", str(tmp_path)]) == 0
    assert prediction_path(tmp_path, default, 4).exists()


def test_a_plan_on_paper_is_kept_for_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [line.split() for line in on_paper(capsys, "--all").splitlines()]
    # 64 images at 294 a second, and 153 MB of gradients of which backward hides two thirds of that.
    wait = parse("allreduce").bytes_per_step(4, PAYLOAD) / GIGABIT - 64 / 294 * 2 / 3
    speed = next(row[6] for row in rows if row[:2] == ["4", "allreduce"])
    assert float(speed) == pytest.approx(4 * 64 / (64 / 294 + wait), rel=0.01)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("gpu", "precision", "speed"),
    [
        ("GeForce RTX 3090", "O1", 905),
        ("4060 Ti", "fp32", 195),  # by its memory's 288 GB/s
    ],
)
def test_the_speed_of_a_card_is_published_or_estimated(gpu, precision, speed):
    found, why = published_speeds.images_per_second(gpu, "resnet50", precision)
    assert found == pytest.approx(speed, abs=0.5)
    assert ("an estimate" in why) == ("40" in gpu)


@pytest.mark.parametrize(
    ("words", "faster"),
    [
        (["--warmup", "0"], False),  # little is left to gain
        (["--gpu", "4090", "--precision", "O1"], True),
        (["--gpu", "4090", "--link", "10gbit"], False),
    ],
)
def test_a_plan_on_paper_says_when_a_faster_switch_is_the_better_answer(capsys, words, faster):
    assert ("With a switch of 2.5 Gbit/s" in on_paper(capsys, *words)) == faster


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"ef:15": "safe", "ef:3": "safe"}, "Best (*): 4 nodes with sync ef:15, 3.60 x"),
        ({"ef:255": "safe"}, "Best (*): 4 nodes with sync ef:255, 2.23 x"),
        ({"bf16": "unsettled"}, "Train on one machine, or raise BATCH"),
    ],
)
def test_the_best_of_a_plan_costs_no_accuracy(capsys, monkeypatch, labels, said):
    known = {"allreduce": "exact", **labels}
    monkeypatch.setattr(prices, "label_of", lambda one, _: known.get(one.spec, "not measured"))
    out = " ".join(on_paper(capsys, "--warmup-chosen").split())
    assert said in out
    faster = "Fastest (+): 4 nodes with sync ef:3, 3.72 x one machine, whose accuracy"
    assert (faster in out) is ("4 + ef:3" in out) is ("ef:3" not in labels)


@pytest.mark.parametrize(
    ("by_member", "machines", "sent", "carried"),
    [
        (True, 4, 1e6, 3 * 64 * 110e3 + 1e6),
        (False, 4, 1e6, 4 * 64 * 110e3),
        (False, 4, 1e9, 64 * 110e3 + 1e9),
        (False, 1, 0.0, 64 * 110e3),
    ],
)
def test_images_and_gradients_are_counted_on_the_fullest_cable(by_member, machines, sent, carried):
    reading = Reading(110e3, by_member)
    assert reading.cable_bytes(machines, machines * 64, sent) == carried


def test_a_plan_advises_by_name_what_takes_images_off_the_cable(capsys):
    """Four cards want 2,017 images/s; three quarters of these go through one cable."""
    out = " ".join(on_paper(capsys, "--precision", "O1").split())
    images, sent = 64 * 4, 7.52e6
    cable = images * GIGABIT / (0.75 * images * 110e3 + sent)
    speeds = re.search(
        r"reach at most ([\d,]+) images/s\. `make shrink SIZE=256` .* each\) allows ([\d,]+)\. "
        r"share_cache_gb in group_vars/all.yml allows ([\d,]+) after",
        out,
    )
    now, shrunk, cached = (float(speed.replace(",", "")) for speed in speeds.groups())
    assert now == pytest.approx(cable, rel=0.01)
    assert now < shrunk / 1.8 and shrunk <= cached
    faster = " ".join(on_paper(capsys, "--precision", "O1", "--link", "10gbit").split())
    assert "make shrink" not in faster


def test_a_plan_counts_the_images_that_a_run_read_from_a_share(tmp_path, capsys):
    """A full cable held that run up: four machines are as fast in the plan, and one, which reads
    its own disk, is not held up by it."""
    settings = {"speed_mbit": 1000, "share_host": "node1", "step": {"data": 1.2}, "checkpoint": 0.0}
    took = sum({**STEP, "data": 1.2}.values())
    carried = formulas.goodput(1000) * took - 1.5 * GRADIENTS  # of images, a step
    folder = tmp_path / "20261120T120000Z-resnet50-4n"
    RunBuilder(folder, mounts=carried / 3 / took / 1e6, **settings).write()
    assert plan(tmp_path, capsys, "--link", "1gbit", "--all")[0] == 0
    step = read_basis(folder)
    rows = predict(step, 4, lambda _: GIGABIT, parse("allreduce"), Phases(90, 0))
    speeds = {row.nodes: row.images_per_second for row in rows if row.sync == "allreduce"}
    assert speeds[4] == pytest.approx(128 / took, rel=0.03)
    assert speeds[1] == pytest.approx(32 / (STEP["forward"] + 0.086), rel=0.03)


@pytest.mark.parametrize(("warmup", "times"), [(0, 3.91), (5, 3.03), (90, 1.20)])
def test_a_plan_counts_the_warm_up_of_the_whole_run(capsys, warmup, times):
    """By hand: a step of 0.218 s alone, 0.223 s with ef:5 and 1.38 s with all-reduce. Where all
    is warm-up, what is fast from the first step is best: bf16."""
    words = ("--warmup", str(warmup), "--warmup-chosen", "--sync", "ef:5")
    out = " ".join(on_paper(capsys, *words).split())
    best = "bf16" if warmup == 90 else "ef:5"
    assert f"4 nodes with sync {best}, {times:.2f} x one machine" in out
    if warmup < 90:
        share = warmup / 90
        assert times == pytest.approx(4 * 0.2177 / (share * 1.378 + (1 - share) * 0.2229), rel=0.01)
    assert ("uses exact sums" in out) is (0 < warmup < 90)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_exact_first_steps_are_planned_where_a_run_begins_with_them(capsys, optimizer):
    out = " ".join(on_paper(capsys, "--sync", "ef:5", "--optimizer", optimizer).split())
    assert ("uses exact sums" in out) is (optimizer == "adamw")


@pytest.mark.parametrize(("nodes", "link"), [(1, "1gbit"), (8, "100gbit")])
def test_a_plan_is_twelve_rows_at_most_and_all_of_them_when_asked(capsys, nodes, link):
    words = ["--link", link, "--nodes", str(nodes), "--sync", "ef:255"]
    out = on_paper(capsys, *words)
    rows, every = rows_in(out), rows_in(on_paper(capsys, *words, "--all"))
    assert len(rows) <= 12
    assert {row[0] for row in rows} >= {"1", str(nodes)}
    left = 1 + (nodes - 1) * len(list_usual()) - len(rows)
    assert len(every) == left + len(rows)
    assert all(row in every for row in rows)
    assert (f"ALL=1 shows {left} more rows." in out) is (left > 0)
    assert nodes == 1 or any("ef:255" in row for row in rows if row[0] == str(nodes))


def rows_in(table):
    return [line.split() for line in table.splitlines() if re.match(r"  \d", line)]


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--link", "fast"], 2, "--link fast"),
        (["--nodes", "0"], 2, "--nodes 0"),
        (["--gpu", "voodoo2"], 2, "--gpu voodoo2: Tandem knows 1070, 1080"),
        (["--gpu", "1080", "--precision", "O1"], 2, "--gpu 1080"),
        (["--gpu", "v100", "--model", "vgg16"], 2, "--model vgg16"),
        (["--sync", "alreduce"], 2, "--sync alreduce: choose one of allreduce"),
        (["--run", "nowhere"], 2, "nowhere"),
        # Nothing was measured: how it can be.
        (["--image-size", "299"], 3, "at 299 pixels"),
        (["--batch", "7"], 3, "`make plan NODES=4 MODEL=resnet50 BATCH=7` measures it"),
        (["--model", "examples.yours:net"], 3, "examples.yours:net"),
    ],
)
def test_plan_says_what_it_needs(tmp_path, capsys, words, code, named):
    RunBuilder(tmp_path / "20261120T120000Z-resnet50-4n").write()
    name = run_id("examples.mine:net", 4, 1.7e9)  # another function of the same name
    RunBuilder(tmp_path / name, model="examples.mine:net").write()
    ended, _, err = plan(tmp_path, capsys, *words)
    assert (ended, named in err, len(err.splitlines())) == (code, True, 1)
    assert not list(tmp_path.glob("plan-*"))


def test_no_column_of_the_table_is_cut(tmp_path, capsys, monkeypatch):
    lost = {"seeds": 9, "difference": -1.0, "low": -2.0, "high": -0.5}
    worst = {"ef:5:peak": lost, "ef:15:peak": {**lost, "samples": 1.4}}
    monkeypatch.setattr(prices, "read_prices", lambda: {"strategies": worst})
    slow = {"backward": 30.0}
    RunBuilder(tmp_path / "20261120T120000Z-resnet50-4n", step=slow, steps=10).write()
    _, out, _ = plan(tmp_path, capsys, "--link", "100mbit", "--all")
    lines = out.splitlines()
    (head,) = (line for line in lines if line.split()[:2] == ["N", "sync"])
    assert head.endswith("  90 epochs") and len(head) <= 80
    rows = [line for line in lines if line.split()[:1] in (["1"], ["4"])]
    assert all(line.endswith((" h", " min")) and len(line) == len(head) for line in rows)
    assert any(" experim. " in line for line in rows) and any(" samples " in x for x in rows)


@pytest.mark.parametrize(
    ("gpu", "level"), [("1080ti", "fp32"), ("titanv", "O1"), ("2080ti", "O1"), ("3090", "bf16")]
)
def test_its_precision_is_that_of_make_train_unless_another_is_asked_for(gpu, level):
    assert paper(gpu, "resnet50", None).precision == level
    assert paper(gpu, "resnet50", "fp32").precision == "fp32"


def test_the_fastest_is_who_has_all_reduces_accuracy_first(monkeypatch):
    """ef:3 has more images/s there; here it takes 1.25 times as many."""
    real, costs = prices.price_of, prices.AccuracyCost(9, -1.0, -1.5, -0.5, 1.25)
    monkeypatch.setattr(
        prices, "price_of", lambda one, *more: costs if one.spec == "ef:3" else real(one, *more)
    )
    basis, rate = paper("2080ti", "resnet50", None), formulas.goodput(1000)
    rows = predict(basis, 4, lambda _: rate, parse("allreduce"), Phases(90, chosen=True))
    thin = next(row for row in rows if (row.sync, row.nodes) == ("ef:3", 4))
    assert fastest(rows).sync == "ef:5"
    assert fastest(rows).run_images_per_second < thin.run_images_per_second


@pytest.mark.parametrize(("optimizer", "sync"), [("sgd", "ef:15"), ("adamw", "allreduce")])
def test_it_recommends_nothing_that_loses_with_the_runs_optimizer(capsys, optimizer, sync):
    """Strategies that leave bits out are safe with SGD alone."""
    words = ["plan", "--gpu", "3090", "--link", "10gbit", "--", "--optimizer", optimizer]
    assert cli.main(words) == 0
    assert f"Best (*): 4 nodes with sync {sync}" in " ".join(capsys.readouterr().out.split())
