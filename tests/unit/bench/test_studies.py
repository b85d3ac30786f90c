"""Each study of accuracy by its smallest real piece."""

import functools
import json
import math
from pathlib import Path

from bench.accuracy import study, tables, text


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


def test_a_language_model_learns_its_text_by_threads_and_by_processes(tmp_path, monkeypatch):
    """With own scales; sums and their divisors are in another order there."""
    for number in range(10):
        (tmp_path / f"{number}.py").write_text(Path(text.__file__).read_text())
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": tmp_path})
    monkeypatch.setattr(text, "text", functools.cache(text.text.__wrapped__))
    for name, less in (("VALIDATED", 2), ("LAYERS", 1), ("BATCH", 8)):
        monkeypatch.setattr(text, name, less)
    every = ({"steps": 15, "gloo": gloo} for gloo in (False, True))
    threads, processes = (
        text.carry_out(text.case("ef:5:own", 1, **more))["loss"] for more in every
    )
    untrained = math.log(text.text(False)[2])
    assert threads < untrained - 0.1 and abs(processes - threads) < 0.05
