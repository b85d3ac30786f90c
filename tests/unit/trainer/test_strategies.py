"""The registry of strategies: what a spec means, and what each one sends."""

import pytest
import torch

from contract.errors import UserError
from contract.strategies import RULES, Argument, Payload, Rule, parse, ring_bytes, usual
from tandem.sync import KINDS
from tandem.sync.allreduce import Compressed
from tests.trainer_ranks import lines, run_ranks, trainer

RESNET50 = Payload(25_557_032 * 4)


def rule(name, *arguments):
    """An entry that sends a byte a step."""
    return Rule(name, "", exact=False, sent=lambda *_: 1.0, arguments=arguments)


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setitem(RULES, "levels", rule("levels", Argument("BITS", ("8", "1.6"))))
    monkeypatch.setitem(RULES, "thin", rule("thin", Argument("R"), Argument("D", default="8")))


def test_each_entry_has_its_code():
    assert set(RULES) == set(KINDS)


def test_only_the_sum_in_the_gradients_own_precision_is_called_exact():
    assert [strategy.spec for strategy in usual() if strategy.exact] == ["allreduce"]
    there, here = parse("allreduce:gloo"), parse("allreduce")
    assert (there.exact, there.uses_gloo, here.uses_gloo) == (True, True, False)


@pytest.mark.parametrize("spec", ["levels:3", "thin:0", "thin:8:fp8", "thin:8:2:4", "thin:٣"])
def test_what_an_argument_cannot_be_is_refused(made_up, spec):
    with pytest.raises(UserError):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "whole"),
    [
        ("bf16", "bf16"),
        ("bf16:gloo", "bf16:gloo"),
        ("levels:1.6", "levels:1.6"),
        ("thin:08:8", "thin:8"),
        ("thin:8:2", "thin:8:2"),
    ],
)
def test_a_spec_is_a_name_and_its_arguments(made_up, spec, whole):
    strategy = parse(spec)
    assert strategy.spec == whole
    assert parse(whole) == strategy


def test_16_bits_are_half_the_bytes_of_a_ring():
    for carrier in ("allreduce", "allreduce:gloo"):
        assert parse(carrier).bytes_per_step(4, RESNET50) == ring_bytes(4, RESNET50.bytes)
    assert parse("bf16").bytes_per_step(4, RESNET50) == ring_bytes(4, RESNET50.bytes / 2)
    double = Payload(RESNET50.bytes * 2, width=8)
    assert parse("fp16").bytes_per_step(4, double) == ring_bytes(4, RESNET50.bytes / 2)


def test_gpus_of_a_machine_that_sum_among_themselves_send_no_more_than_one():
    for spec in ("ef:5", "powersgd:4"):
        strategy = parse(spec)
        assert strategy.bytes_per_step(2, RESNET50, gpus=4) == strategy.bytes_per_step(2, RESNET50)
    # A ring over all ranks goes out of each machine once.
    assert parse("bf16").bytes_per_step(2, RESNET50, gpus=4) == ring_bytes(8, RESNET50.bytes / 2)
    assert parse("allreduce").bytes_per_step(1, RESNET50, gpus=4) == 0


class FP64(Compressed):
    dtype = torch.float64


ENTRY = Rule("fp64", "summed in float64", exact=True, sent=lambda *_: 8.0, usual=("fp64",))


def with_a_new_one(*argv):
    RULES["fp64"], KINDS["fp64"] = ENTRY, FP64
    return trainer(*argv)


def test_a_new_one_takes_an_entry_a_class_and_a_name(images, tmp_path, monkeypatch):
    """Two ranks train by it, and a prediction compares it."""
    argv = ["--data", images, "--output", tmp_path, "--model", "tests.trainer_models:plain"]
    argv += ["--epochs", 1, "--precision", "fp32", "--workers", 0, "--sync", "fp64"]
    assert run_ranks([1, 1], with_a_new_one, *argv) == [0, 0]
    assert [start["sync"] for start, *_ in lines(tmp_path)] == ["fp64"] * 2
    monkeypatch.setitem(RULES, "fp64", ENTRY)
    assert "fp64" in [one.spec for one in usual()]
