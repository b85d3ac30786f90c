"""Each measurement and model of bench/ by its smallest real piece."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench import (
    decoding,
    gpu,
    gpu_peers,
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
    outcome, _, cpu = test_bench_launcher.run_attempt(tmp_path, "print('here')")
    assert outcome.status == "finished"
    assert cpu > 0
    assert (tmp_path / "run/nodes/node1/rank0.log").read_text() == "here\n"


def test_gpu_compares_ours_with_others(tmp_path):
    data = gpu.photographs(tmp_path, 4)
    setting = gpu_peers.Setting(CPU, data, "resnet18", 32, 2, "fp32", False, False)
    rows = list(gpu.compare_contenders(setting, SimpleNamespace(rounds=1, seconds=0.0)))
    assert [row[1] for row in rows] == [kind.name for kind in gpu_peers.contenders()]
    assert all(float(row[2]) > 0 for row in rows)


def test_each_way_from_a_jpeg_makes_a_crop():
    content = decoding.photograph(64, 48, 70, 0)
    sizes = {np.asarray(load(content, Random(0))).size for load in decoding.WAYS.values()}
    assert sizes == {224 * 224 * 3}
