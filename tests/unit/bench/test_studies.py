"""Each study of accuracy by its smallest real piece."""

import dataclasses
import json
import math

import pytest

from bench.accuracy import adamw, study, tables, text


@pytest.mark.parametrize("sync", ["ef:5", "bf16"])
def test_study_runs_a_case_and_knows_it_by_its_line(monkeypatch, tmp_path, sync):
    for name in ("TRAIN", "VAL", "EPOCH_STEPS"):
        monkeypatch.setattr(study, name, 2)
    case = study.Case(sync, seed=7, epochs=1, start="none")
    line = json.dumps(study.train_case(case, study.images.__wrapped__(study.GLYPHS, 7)))
    lines = tmp_path / "lines.jsonl"
    lines.write_text(f"{line}\n{line[:40]}")  # the second was broken off
    assert 0 <= study.accuracy_by_case(study.read_runs(lines))[case] <= 1
    assert not study.ends_whole(lines)
    lines.write_text(f"{line}\n")
    assert study.ends_whole(lines)


def test_tables_make_the_prices_that_are_committed():
    prices = tables.make_prices(study.read_runs(), text.read_runs(text.LINES))
    assert json.loads(json.dumps(prices)) == json.loads(tables.PRICES.read_text())


def accuracy(case):
    """As if 0.004 were the best rate of AdamW, and coded sums lost half a point."""
    lost = 0.005 if case.sync.startswith("ef") else 0.001 * (case.start == "backwards")
    return 0.9 - abs(math.log2(case.lr / 0.004)) / 10 - lost


def test_adamw_runs_pairs_at_the_rate_that_all_reduce_was_best_at():
    lines = []
    for _ in range(8 + 2 * len(adamw.ARMS)):
        case = next(adamw.missing_runs(lines, (study.GLYPHS,)))
        lines.append({**dataclasses.asdict(case), "top1": accuracy(case), "step_length": 1.02})
    tuned = [(line["lr"], line["seed"]) for line in lines[:8]]
    assert tuned == [(rate, seed) for rate in (0.001, 0.002, 0.004, 0.008) for seed in (101, 102)]
    assert {line["lr"] for line in lines[8:]} == {0.004, 0.0036, 0.0044}
    assert [line["seed"] for line in lines[8:]] == [13] * 6 + [14] * 6
    rows = [row.split("|") for row in adamw.difference_table(lines).splitlines()]
    coded = next(row for row in rows if "75 exact" in row[3])
    assert coded[4:7] == [" 2 ", " -0.45 (-0.45 to -0.45) ", " x 1.020 "]
    # From 0.9 to 1.1 x the rate, 0.145 points are gained, so 2 % are worth 0.0145.
    assert coded[7].strip() == "+0.01"
