"""Each measurement and model of bench/ by its smallest real piece."""

from types import SimpleNamespace

import pytest
import torch

from bench import (
    codec,
    gpu,
    gpu_codec,
    gpu_peers,
    mutants,
    test_bench_launcher,
    test_bench_records,
)

CPU = torch.device("cpu")


@pytest.fixture
def figures():
    return []


@pytest.fixture
def figure(figures):
    return lambda name, value, unit, aim="": figures.append(value)


def test_records_of_a_guard_and_of_a_controller_are_counted(figure, figures, tmp_path, monkeypatch):
    monkeypatch.setattr(test_bench_records, "SECONDS", 3)
    test_bench_records.test_a_guard(tmp_path, figure, 10)
    size, milliseconds, _ = figures
    assert 100 < size <= 2000
    assert milliseconds > 0
    test_bench_records.test_a_controller(tmp_path, figure, 2)


def test_the_launcher_s_stand_in_ends_under_real_guards(tmp_path, monkeypatch):
    monkeypatch.setattr(test_bench_launcher, "NODES", 1)
    outcome, _, cpu = test_bench_launcher.watched(tmp_path, "print('here')")
    assert outcome.status == "finished"
    assert cpu > 0
    assert (tmp_path / "run/nodes/node1/rank0.log").read_text() == "here\n"


def test_gpu_measures_ours_beside_others(tmp_path):
    data = gpu.photographs(tmp_path, 4)
    setting = gpu_peers.Setting(CPU, data, "resnet18", 32, 2, "fp32", False, False)
    rows = list(gpu.beside(setting, SimpleNamespace(rounds=1, seconds=0.0)))
    assert [row[1] for row in rows] == [one.name for one in gpu_peers.contenders()]
    assert all(float(row[2]) > 0 for row in rows)


def test_one_failed_compilation_leaves_the_other_tables(monkeypatch):
    def beside(setting, scale):
        if setting == "compiled":
            raise RecursionError("no | kernel\nfor this")
        yield [setting, "tandem", "7", "1.00", ""]

    def loader_alone(*_):
        yield ["loader", "9 images/s"]
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(gpu, "photographs", lambda *_: None)
    monkeypatch.setattr(gpu_codec, "MIB", 2**12)
    monkeypatch.setattr(gpu, "settings", lambda *_: ["compiled", "plain"])
    monkeypatch.setattr(gpu, "beside", beside)
    monkeypatch.setattr(gpu, "loader_alone", loader_alone)
    monkeypatch.setattr(gpu, "fed", lambda *_: iter(()))
    monkeypatch.setattr(gpu, "parts", lambda *_: iter([["clock", "1 s"]]))
    scale = gpu.Scale(CPU)
    scale.repeats = scale.steps = 1
    scale.models = [("resnet18", 32, 2)]
    text = gpu.measured(CPU, scale)
    assert "| compiled | failed: RecursionError: no / kernel for this |" in text
    assert "| plain | 7 |" in text
    assert "| loader | 9 images/s |" in text and "| clock | 1 s |" in text
    assert "| loader_alone | does not fit into memory |" in text
    coded = [line.split(",")[0] for line in text.splitlines() if ", a bucket of " in line]
    assert coded == [f"| {spec}" for spec in codec.SHOWN]
    assert " 1 Gbit/s played by sleep | " in text


def test_drawn_mutants_are_distinct_and_compile(monkeypatch):
    monkeypatch.setattr(mutants, "ROOMS", ("contract",))
    drawn = mutants.draw(mutants.ROOT)
    assert len({one.key for one in drawn}) == mutants.COUNT
    for one in drawn:
        text = (mutants.ROOT / one.file).read_bytes()
        old = one.old.encode()
        assert text[one.start :].startswith(old)
        compile(text[: one.start] + one.new.encode() + text[one.start + len(old) :], "", "exec")
