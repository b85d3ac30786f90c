"""Each study of accuracy by its smallest real piece."""

import json

import pytest

from bench.accuracy import study, tables


@pytest.mark.parametrize("sync", ["ef:5", "bf16"])
def test_study_runs_a_case_and_knows_it_by_its_line(monkeypatch, tmp_path, sync):
    for name in ("TRAIN", "VAL", "EPOCH_STEPS"):
        monkeypatch.setattr(study, name, 2)
    case = study.Case(sync, seed=7, epochs=1, start="none")
    line = json.dumps(study.carry_out(case, study.images.__wrapped__(study.GLYPHS, 7)))
    lines = tmp_path / "lines.jsonl"
    lines.write_text(f"{line}\n{line[:40]}")  # the second was broken off
    assert 0 <= study.results(study.known(lines))[case] <= 1
    assert not study.ends_whole(lines)


def test_tables_make_the_prices_that_are_committed():
    lines = study.known()
    prices = tables.whole(lines)
    assert json.loads(json.dumps(prices)) == json.loads(tables.PRICES.read_text())
