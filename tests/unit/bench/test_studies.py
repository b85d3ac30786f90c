"""Each study of accuracy by its smallest real piece."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ImageFont

from bench.accuracy import cells, entropy, fonts, levels, study, tables, text
from contract.strategies import UNIT
from tandem.sync.codec import CODECS, Codec
from tandem.sync.feedback import ErrorFeedback


def test_study_runs_a_case_and_knows_it_by_its_line(monkeypatch, tmp_path):
    for name in ("TRAIN", "VAL", "EPOCH_STEPS"):
        monkeypatch.setattr(study, name, 2)
    case = study.Case(study.CODED, seed=7, epochs=1)
    line = json.dumps(study.carry_out(case, study.images.__wrapped__(study.GLYPHS, 7)))
    lines = tmp_path / "lines.jsonl"
    lines.write_text(f"{line}\n{line[:40]}")  # the second was broken off
    assert 0 <= study.results(study.known(lines))[case] <= 1
    assert not study.ends_whole(lines)


def test_tables_make_the_prices_that_are_committed():
    lines = study.known()
    prices = tables.whole(lines)
    assert json.loads(json.dumps(prices)) == json.loads(tables.PRICES.read_text())


def test_levels_go_on_with_what_is_not_there_and_count_pairs_by_todays_names():
    stage = levels.STAGES[0]
    exact, coded = list(stage.cases())[:2]
    sgd = levels.Stage(study.GLYPHS, "sgd", ("ef:3:peak",), range(1, 2))
    before = dataclasses.replace(sgd.case("ef:3:peak", 1), sync="ef:1.6")
    lines = levels.by_todays_names(
        {exact: 0.75, coded: 0.76, before: 0.5, sgd.case("allreduce", 1): 0.8}
    )
    assert levels.differences(lines, stage, coded.sync) == pytest.approx([1.0])
    assert levels.differences(lines, sgd, "ef:3:peak") == pytest.approx([-30.0])
    assert next(levels.left(lines, [], False)) not in (exact, coded)
    assert f"| `{coded.sync}` | 1 | +1.00 |" in "".join(levels.table(lines, []))


def test_a_language_model_learns_its_text_by_threads_and_by_processes(tmp_path, monkeypatch):
    """With own scales; sums and their divisors are in another order there."""
    for number in range(10):
        (tmp_path / f"{number}.py").write_text(Path(text.__file__).read_text())
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": tmp_path})
    monkeypatch.setattr(text, "text", functools.cache(text.text.__wrapped__))
    monkeypatch.setattr(text, "VALIDATED", 2)
    every = ({"steps": 15, "gloo": gloo} for gloo in (False, True))
    threads, processes = (
        text.carry_out(text.case("ef:5:own", 1, **more))["loss"] for more in every
    )
    untrained = math.log(text.text(False)[2])
    assert threads < untrained - 0.2 and abs(processes - threads) < 0.05


def test_cells_have_a_slow_link_cost_all_reduce_more_than_one_machine_alone():
    steps = study.EPOCHS * study.EPOCH_STEPS * study.NODES
    alone, coded, exact = (
        cells.whole(sync, 1.0, 100, 0.05, 4) for sync in (study.ALONE, study.CODED, study.EXACT)
    )
    assert alone == pytest.approx(steps * 0.05)
    assert alone < coded < exact


def test_the_tables_of_whole_runs_say_what_exact_first_steps_cost():
    base = study.Case("allreduce", 1, lr=0.002, optimizer="adamw")
    other = dataclasses.replace(base, sync="ef:5:own")
    cases = {base: 0.7, other: 0.71, dataclasses.replace(other, start="none"): 0.6}
    lines = [{**dataclasses.asdict(case), "top1": top1} for case, top1 in cases.items()]
    exact, coded = tables.phases_table(lines)[2:]
    assert "| exact | 1 | +1.00 | - | 1.00 |" in exact
    assert "| coded | 1 | -10.00 | - | - |" in coded
    took = [tables.run_seconds(other.sync, 1.0, start) for start in ("", "none")]
    warmup = 75 * (tables.seconds("allreduce")[0] - tables.seconds(other.sync)[0])
    assert took[0] - took[1] == pytest.approx(warmup)
    assert "no exact steps | 1 | - | - |" in cells.rows(lines)[-1]


def test_entropy_counts_the_zeros_of_codes(monkeypatch):
    monkeypatch.setattr(Codec, "_levels", Codec._levels)  # `count` replaces both
    monkeypatch.setattr(ErrorFeedback, "_sum", ErrorFeedback._sum)
    shares = {"gradients": [], "sums": []}
    entropy.count(shares)
    rows = torch.zeros(1, UNIT)
    rows[:, ::4] = 1.0
    CODECS[3].encode(rows)
    assert shares == {"gradients": [[0.75, 0.25]], "sums": []}
    assert entropy.bits([1 / 3, 2 / 3]) == pytest.approx(math.log2(3))


def test_fonts_draw_and_are_held_out_by_their_makers(tmp_path, monkeypatch):
    monkeypatch.setattr(fonts, "PACKAGES", ["one", "other"])
    for name, size in (("one", 20), ("other", 30)):
        folder = tmp_path / f"fonts-{name}"
        folder.mkdir()
        (folder / "font.ttf").write_bytes(ImageFont.load_default(size).path.getvalue())
    drawn = fonts.draw(tmp_path)
    assert drawn.pixels.shape == (1, len(fonts.CHARACTERS), fonts.SIZE, fonts.SIZE)  # each once
    both = drawn._replace(pixels=drawn.pixels.repeat(8, 0), makers=np.array(list("aabbccdd")))
    trained, held_out = both.split(seed=1)
    assert {both.makers[n] for n in trained}.isdisjoint(both.makers[n] for n in held_out)
    images, classes = both.drawn(held_out[:1], [1, 0])
    assert fonts.residual_net()(images[:2].float()).shape == (2, 128, 4, 4)
    assert len(images) == len(classes) == len(fonts.CHARACTERS)
