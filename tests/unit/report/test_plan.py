"""Predictions: the formulas against what was measured, and `python -m report plan`."""

import json
import re

import pytest

from bench import link_table
from contract import prices
from contract.runs import prediction_path, run_id
from contract.strategies import MIB, Payload, parse, ring_bytes, usual
from launcher import cli
from report import formulas, published_speeds
from report.__main__ import main
from report.advice import NONE, advise
from report.analysis import analyse
from report.bottleneck import Seen
from tests.unit.report.report_runs import BOTTLENECKS, GRADIENTS, RunBuilder

# Measured over links shaped to 1 Gbit/s: ResNet-50's gradients, four ranks on two cores. A step
# without communication took 0.26 s, two thirds of it backward.
WORK, BACKWARD = 0.26, 0.26 * 2 / 3
GIGABIT = formulas.goodput(1000)
PAYLOAD = Payload(GRADIENTS)


@pytest.mark.parametrize(
    ("sync", "measured"), [("allreduce", 1.41), ("fp16", 0.73), ("bf16", 0.73)]
)
def test_step_over_a_slow_link_agrees_with_the_measured_one(sync, measured):
    step = WORK + formulas.sync_wait(parse(sync), 4, PAYLOAD, GIGABIT, BACKWARD)
    assert step == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("world", "measured"), [(2, 0.857), (4, 1.286), (5, 1.376)])
def test_all_reduce_alone_agrees_with_the_measured_one(world, measured):
    assert ring_bytes(world, GRADIENTS) / GIGABIT == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("sync", "measured"), [("allreduce", 153.7e6), ("fp16", 76.8e6)])
def test_bytes_sent_agree_with_the_counted_ones(sync, measured):
    assert parse(sync).bytes_per_step(4, PAYLOAD) == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("transfer", [0.01, 0.1, 1.0])
def test_transfer_is_found_again_from_what_was_waited(transfer):
    waited = formulas.exposed(transfer, PAYLOAD, 0.08)
    assert formulas.transfer_of(waited, PAYLOAD, 0.08) == pytest.approx(transfer)


def test_smaller_buckets_leave_less_to_wait_for():
    """Of a transfer that backward hides, the last bucket stays."""
    one = formulas.exposed(0.1, Payload(1e8, bucket=MIB), 1.0)
    assert one == pytest.approx(0.1 * MIB / 1e8)
    assert formulas.exposed(0.1, Payload(1e8), 1.0) == pytest.approx(25 * one)


def test_the_size_of_the_buckets_reaches_the_prediction(tmp_path):
    speeds = {}
    for size in (1, 25):
        run = RunBuilder(tmp_path / f"run{size}", bucket_mb=size).write()
        speeds[size] = analyse(run).step.wait(parse("bf16"), 4, 1e10)
    assert 0 < speeds[1] < speeds[25] / 20


def test_advice_on_a_slow_link_says_that_one_machine_is_faster(tmp_path, monkeypatch):
    # Advice names what was measured and did not lose; what that is, is no matter of this test.
    even = {"seeds": 2, "difference": 0.0, "low": -1.0, "high": 1.0}
    monkeypatch.setattr(prices, "read", lambda: {"strategies": {"ef:1.6": even, "bf16": even}})
    summary = analyse(RunBuilder(tmp_path / "run", **BOTTLENECKS["network"]).write()).summary
    advice = {item["change"].split(": ")[0]: item for item in summary["advice"]}
    assert advice["NODES=1"]["predicted_images_per_second"] == pytest.approx(32 / 0.128, rel=0.01)
    # The fewest bits: 1.6 and a sixteenth of 32, and a last bucket of 8 MiB that nothing hides.
    least = (1.2 + 0.08) * (1.6 + 1 / 16) / 32
    assert advice["SYNC=ef:1.6"]["predicted_images_per_second"] == pytest.approx(
        128 / (0.128 + max(least - 0.08, least * 8 * MIB / GRADIENTS)), rel=0.01
    )
    # Free ones first, the largest gain first. With so few bits a larger batch adds nothing.
    ranks = [
        (item["costs_money"], -item["predicted_images_per_second"]) for item in summary["advice"]
    ]
    assert ranks == sorted(ranks)
    assert [cost for cost, _ in ranks].count(True) == 2
    assert not any(change.endswith("together") for change in advice)
    gains = [item["predicted_images_per_second"] for item in summary["advice"]]
    assert min(gains) > summary["images_per_second"]


def test_nothing_is_advised_without_a_measured_step():
    assert advise(None, "none", {}, Seen()) == NONE


def test_no_advice_on_the_network_when_nothing_waits_for_it(tmp_path):
    run = RunBuilder(tmp_path / "run", nodes=1, sent=0.0, step={"sync_exposed": 0.0}).write()
    assert not any("SYNC" in item["change"] for item in analyse(run).summary["advice"])


def plan(tmp_path, capsys, *arguments):
    code = main(["plan", "--runs", str(tmp_path), "--model", "resnet50", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_from_one_node_tells_the_truth_about_four(tmp_path, capsys):
    step = {"sync_exposed": 0.0}
    RunBuilder(tmp_path / "20261120T120000Z-resnet50-1n", nodes=1, sent=0.0, step=step).write()
    code, out, _ = plan(tmp_path, capsys, "--sync", "bf16")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "One machine is 2.6 x as fast as 4 with sync allreduce" in out
    document = json.loads((tmp_path / "plan-resnet50-4n.json").read_text())
    assert document["sync"] == "bf16"
    waited = formulas.sync_wait(parse("bf16"), 4, PAYLOAD, GIGABIT, 0.08)
    assert document["images_per_second"] == pytest.approx(128 / (0.128 + waited), rel=1e-3)
    assert {(row["nodes"], row["sync"]) for row in document["rows"]} == {
        (1, "allreduce"),
        *((n, strategy.spec) for n in (2, 3, 4) for strategy in usual()),
    }


def test_plan_takes_the_newest_run_that_measured_a_step(tmp_path, capsys):
    old = RunBuilder(tmp_path / "20261120T120000Z-resnet50-2n", nodes=2)
    old.write()
    (tmp_path / "20261120T130000Z-resnet50-2n/nodes").mkdir(parents=True)
    RunBuilder(tmp_path / "20261120T140000Z-vgg16-2n", nodes=2, model="vgg16").write()
    _, out, _ = plan(tmp_path, capsys, "--nodes", "2")
    assert "20261120T120000Z-resnet50-2n" in " ".join(out.split())


def test_plan_without_a_model_is_for_what_make_train_starts_without_one(tmp_path, capsys):
    default = cli._new(cli._parse(["train"])).model
    run = run_id(default, 4, 1.7e9)
    RunBuilder(tmp_path / run, model=default).write()
    assert main(["plan", "--runs", str(tmp_path)]) == 0
    assert prediction_path(tmp_path, default, 4).exists()


def test_plan_does_not_take_another_function_of_the_same_name(tmp_path, capsys):
    run = run_id("examples.mine:net", 4, 1.7e9)
    RunBuilder(tmp_path / run, model="examples.mine:net").write()
    code, _, told = plan(tmp_path, capsys, "--model", "examples.yours:net")
    assert code == 3
    assert "Nothing of examples.yours:net" in told


def test_a_plan_on_paper_needs_no_run(tmp_path, capsys):
    words = ["--gpu", "RTX 2080Ti", "--link", "1gbit", "--precision", "fp32", "--all"]
    code, out, _ = plan(tmp_path, capsys, *words)
    assert code == 0
    # 64 images at 294 a second, and 153 MB of gradients of which backward hides two thirds of that.
    wait = parse("allreduce").bytes_per_step(4, PAYLOAD) / GIGABIT - 64 / 294 * 2 / 3
    rows = [line.split() for line in out.splitlines()]
    speed = next(row[6] for row in rows if row[:2] == ["4", "allreduce"])
    assert float(speed) == pytest.approx(4 * 64 / (64 / 294 + wait), rel=0.01)
    # As cards counted of ResNet-50 over shaped links: docs/slow-links.md.
    assert ["4", "powersgd:4", "2.30", "MB"] in [row[:4] for row in rows]
    assert "ef:1.6 7.97 MB" in " ".join(out.split())
    assert "Best exact (=): one machine." in " ".join(out.split())
    assert "lambdalabs.com" in out
    assert not list(tmp_path.glob("plan-*"))


def test_a_plan_on_paper_without_a_model_is_of_resnet50(capsys):
    assert main(["plan", "--gpu", "3090"]) == 0
    assert capsys.readouterr().out.startswith("resnet50 at 224 pixels in bf16, 64 images")


@pytest.mark.parametrize(
    ("gpu", "precision", "speed", "told"),
    [
        ("GeForce RTX 3090", "O1", 905, "published at github.com/lambdal"),
        ("2080ti", "fp32", 294, "published at lambdalabs.com"),
        ("4060 Ti", "fp32", 195, "an estimate, by the memory's 288 GB/s"),
        ("rtx-4070", "bf16", 572, "an estimate, by the memory's 504 GB/s"),
    ],
)
def test_the_speed_of_a_card_says_where_it_comes_from(gpu, precision, speed, told):
    found, why = published_speeds.images_per_second(gpu, "resnet50", precision)
    assert found == pytest.approx(speed, abs=0.5)
    assert told in why


@pytest.mark.parametrize(("bits", "level"), [("fp32", "fp32"), ("16 bits", "O1")])
def test_estimates_are_near_what_was_published(monkeypatch, bits, level):
    """The cards of the tables that the fit was made from, all but the 3080 in 16 bits."""
    for name in ("2080ti", "titanrtx", "rtx5000", "3090", "a6000", "a10", "4090", "6000ada"):
        known = published_speeds.CARDS[name]
        published = known.half if level == "O1" else known.fp32
        bare = published_speeds.Card(known.gigabytes, known.teraflops)
        monkeypatch.setitem(published_speeds.CARDS, name, bare)
        estimated, why = published_speeds.images_per_second(name, "resnet50", level)
        assert "an estimate" in why
        # 2080ti and titanrtx: TensorFlow's figures, 7 % over those of the fit.
        assert estimated == pytest.approx(published, rel=0.13), name


def test_a_plan_on_paper_says_when_a_faster_switch_is_the_better_answer(tmp_path, capsys):
    def said(*words):
        return " ".join(plan(tmp_path, capsys, *words)[1].split())

    told = said("--gpu", "2080ti", "--warmup", "0")
    assert "A switch of 2.5 Gbit/s would give hardly more." in told
    fast = said("--gpu", "4090", "--precision", "O1")
    assert "With a switch of 2.5 Gbit/s: sync ef:1.6 on 4, 3.46 x one machine" in fast
    assert "With a switch" not in said("--gpu", "4090", "--link", "10gbit")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"ef:4": "safe", "ef:1.6": "safe"}, "Best (*): 4 nodes with sync ef:1.6, 3.69 x"),
        ({"ef:8": "safe"}, "Best (*): 4 nodes with sync ef:8, 2.11 x"),
        ({"bf16": "unsettled"}, "Train on one machine, or raise BATCH"),
        ({"powersgd:4": "safe"}, "Best (*): 4 nodes with sync powersgd:4, 3.70 x"),
    ],
)
def test_the_best_of_a_plan_costs_no_accuracy(tmp_path, capsys, monkeypatch, labels, said):
    told = {"allreduce": "exact", **labels}
    monkeypatch.setattr(prices, "label_of", lambda one, _: told.get(one.spec, "not measured"))
    words = ["--gpu", "2080ti", "--link", "1gbit", "--precision", "fp32"]
    out = " ".join(plan(tmp_path, capsys, *words)[1].split())
    assert said in out
    faster = "Fastest (+): 4 nodes with sync powersgd:4, 3.70 x one machine, whose accuracy"
    assert (faster in out) is ("powersgd:4" not in labels)
    assert ("4 + powersgd:4" in out) is (faster in out)


def test_a_plan_says_how_many_images_more_the_fastest_takes(tmp_path, capsys):
    out = " ".join(plan(tmp_path, capsys, "--gpu", "4090")[1].split())
    assert re.search(r"powersgd:4, .* accuracy is all-reduce's after 1\.\d\d times as many", out)


@pytest.mark.parametrize(
    ("epochs", "warmup", "times"), [("90", "1", 3.69), ("90", "0", 3.90), ("90", "5", 3.03)]
)
def test_a_plan_counts_the_warm_up_of_the_whole_run(tmp_path, capsys, epochs, warmup, times):
    """By hand: a step of 0.218 s alone, 0.223 s with ef:1.6 and 1.38 s with all-reduce."""
    words = ["--gpu", "2080ti", "--link", "1gbit", "--precision", "fp32"]
    words += ["--epochs", epochs, "--warmup", warmup]
    out = " ".join(plan(tmp_path, capsys, *words)[1].split())
    assert f"4 nodes with sync ef:1.6, {times:.2f} x one machine" in out
    share = float(warmup) / float(epochs)
    assert times == pytest.approx(4 * 0.2177 / (share * 1.378 + (1 - share) * 0.2232), rel=0.01)
    assert ("of warm-up (--sync_warmup), in which ef" in out) is (warmup != "0")


def test_a_plan_of_a_run_that_is_all_warm_up_takes_what_is_fast_from_the_first_step(
    tmp_path, capsys
):
    words = ["--gpu", "2080ti", "--precision", "fp32", "--epochs", "1", "--sync", "ef:2"]
    out = " ".join(plan(tmp_path, capsys, *words)[1].split())
    assert "Best (*): 4 nodes with sync bf16, 1.20 x" in out
    assert "All 1 epochs are warm-up, in which ef sums as allreduce does" in out


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
@pytest.mark.parametrize("link", ["100mbit", "1gbit", "100gbit"])
def test_a_plan_is_twelve_rows_at_most_and_all_of_them_when_asked(tmp_path, capsys, nodes, link):
    words = ["--gpu", "2080ti", "--link", link, "--nodes", str(nodes), "--sync", "ef:8"]
    out = plan(tmp_path, capsys, *words)[1]
    rows = rows_in(out)
    assert len(rows) <= 12
    assert {row[0] for row in rows} >= {"1", str(nodes)}
    every = rows_in(plan(tmp_path, capsys, *words, "--all")[1])
    left = 1 + (nodes - 1) * len(usual()) - len(rows)
    assert len(every) == left + len(rows)
    assert all(row in every for row in rows)
    assert (f"ALL=1 shows {left} more rows." in out) is (left > 0)
    if nodes > 1:
        assert any("ef:8" in row for row in rows if row[0] == str(nodes))


def rows_in(table):
    return [line.split() for line in table.splitlines() if re.match(r"  \d", line)]


def test_plan_recommends_all_machines_when_the_link_is_fast(tmp_path, capsys):
    RunBuilder(tmp_path / "20261120T120000Z-resnet50-4n").write()
    _, out, _ = plan(tmp_path, capsys, "--link", "100gbit")
    assert "Best (*): 4 nodes" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--link", "fast"], "--link fast"),
        (["--link", "0gbit"], "--link 0gbit"),
        (["--nodes", "0"], "--nodes 0"),
        (["--epochs", "0"], "--epochs 0: must be a number from 1."),
        (["--warmup", "nan"], "--warmup nan"),
        (["--gpu", "voodoo2"], "--gpu voodoo2: known are 1070, 1080"),
        (["--gpu", "1080", "--precision", "O1"], "--gpu 1080: no speed in 16 bits is known"),
        (["--gpu", "v100", "--model", "vgg16"], "--model vgg16"),
        (["--sync", "alreduce"], "--sync alreduce: choose one of allreduce"),
        (["--nodes", "x"], "report: argument --nodes: invalid int value: 'x'. See"),
        (["--run", "nowhere"], "nowhere"),
    ],
)
def test_plan_says_what_it_needs(tmp_path, capsys, arguments, words):
    RunBuilder(tmp_path / "20261120T120000Z-resnet50-4n").write()
    code, _, err = plan(tmp_path, capsys, *arguments)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.glob("plan-*"))


def test_where_nothing_was_measured_it_is_said_how_it_can_be(tmp_path, capsys):
    RunBuilder(tmp_path / "20261120T120000Z-resnet50-4n").write()
    for words, told in ((["--image-size", "299"], "at 299 pixels"), (["--batch", "7"], "7 images")):
        code, _, err = plan(tmp_path, capsys, *words)
        assert (code, told in err) == (3, True)
    assert "`make plan NODES=4 MODEL=resnet50 BATCH=7` takes the machines" in err
    assert len(err.splitlines()) == 1


def test_no_column_of_the_table_is_cut(tmp_path, capsys, monkeypatch):
    lost = {"seeds": 9, "difference": -1.0, "low": -2.0, "high": -0.5}
    worst = {"ef:2": lost, "ef:4": {**lost, "samples": 1.4}}
    monkeypatch.setattr(prices, "read", lambda: {"strategies": worst})
    slow = {"backward": 30.0}
    RunBuilder(tmp_path / "20261120T120000Z-resnet50-4n", step=slow, steps=100).write()
    _, out, _ = plan(tmp_path, capsys, "--link", "100mbit", "--all")
    lines = out.splitlines()
    (head,) = (line for line in lines if line.split()[:2] == ["N", "sync"])
    assert head.endswith("  90 epochs") and len(head) <= 80
    rows = [line for line in lines if line.split()[:1] in (["1"], ["4"])]
    assert all(line.endswith((" h", " min")) and len(line) == len(head) for line in rows)
    assert any(" experim. " in line for line in rows) and any(" samples " in x for x in rows)


def test_the_page_of_slow_links_says_how_far_off_todays_plan_is():
    """As `python -m bench.link_table` writes it of the committed measurements."""
    page = (link_table.DOCS / "slow-links.md").read_text()
    rows = json.loads((link_table.DOCS / "slow-links.json").read_text())["rows"]
    assert link_table.sentences(rows) in page
    cell = {"nodes": 4, "mbit": 1000, "sync": "bf16", "seconds": 0.7, "alone": 0.12, "busy": 0.1}
    sent = parse("bf16").bytes_per_step(4, PAYLOAD) / GIGABIT - 0.08
    seen = link_table.agreement([{**cell, "efficiency": 0.5}, {**cell, "busy": 0.8}])
    assert seen["cells"] == seen["found"] == seen["links"] == 1
    assert seen["median"] == pytest.approx(1 - (0.12 + sent) / 0.7)
    slower = [{**cell, "efficiency": 0.5}, {**cell, "sync": "ef:2", "efficiency": 0.48}]
    assert link_table.agreement(slower)["found"] == 0
