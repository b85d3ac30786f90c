"""The registry of strategies: what a spec means, and what each one sends."""

import pytest

from contract.errors import UserError
from contract.strategies import RULES, Argument, Payload, Rule, parse, ring_bytes, usual
from trainer.sync import KINDS

RESNET50 = Payload(25_557_032 * 4)


def rule(name, *arguments, wires=()):
    """An entry that sends a byte a step."""
    return Rule(name, "", exact=False, sent=lambda *_: 1.0, arguments=arguments, wires=wires)


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setitem(RULES, "levels", rule("levels", Argument("BITS", ("8", "1.6"))))
    rounds = rule("rounds", Argument("H"), Argument("D", default="H"), wires=("fp32", "int8"))
    monkeypatch.setitem(RULES, "rounds", rounds)


def test_each_entry_has_its_code():
    assert set(RULES) == set(KINDS)


def test_what_carries_a_sum_is_no_matter_of_what_it_sends_or_costs():
    there, here = parse("allreduce:gloo"), parse("allreduce")
    assert there.bytes_per_step(4, RESNET50) == here.bytes_per_step(4, RESNET50)
    assert (there.exact, there.by_gloo, here.by_gloo) == (True, True, False)


def test_only_the_sum_in_the_gradients_own_precision_is_called_exact():
    assert [strategy.spec for strategy in usual() if strategy.exact] == ["allreduce"]


@pytest.mark.parametrize(
    ("spec", "whole", "every", "delay"),
    [
        ("bf16", "bf16", 1, 0),
        ("bf16:auto", "bf16", 1, 0),
        ("bf16:gloo", "bf16:gloo", 1, 0),
        ("levels:1.6", "levels:1.6", 1, 0),
        ("rounds:8:8:fp32", "rounds:8", 8, 8),
        ("rounds:08:int8", "rounds:8:int8", 8, 8),
        ("rounds:8:2:int8", "rounds:8:2:int8", 8, 2),
    ],
)
def test_a_spec_is_a_name_its_arguments_and_a_wire(made_up, spec, whole, every, delay):
    strategy = parse(spec)
    assert (strategy.spec, strategy.every, strategy.delay) == (whole, every, delay)
    assert parse(whole) == strategy
    assert strategy.local == (every > 1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("alreduce", "--sync alreduce: choose one of allreduce[:BACKEND], bf16[:BACKEND]"),
        ("bf16:2", "BACKEND is one of auto, gloo, not '2'"),
        ("bf16:gloo:2", "write bf16[:BACKEND]."),
        ("levels", "write levels:BITS."),
        ("levels:3", "BITS is one of 8, 1.6, not '3'"),
        ("rounds:0", "H is a whole number from 1, not '0'"),
        ("rounds:8:fp8", "D is a whole number from 1, not 'fp8'"),
        ("rounds:8:2:int8:fp32", "write rounds:H[:D][:WIRE], WIRE one of fp32, int8."),
        ("rounds:٣", "not '٣'"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(made_up, spec, words):
    with pytest.raises(UserError) as caught:
        parse(spec)
    assert words in str(caught.value)


def test_16_bits_are_half_the_bytes_of_a_ring():
    assert parse("allreduce").bytes_per_step(4, RESNET50) == ring_bytes(4, RESNET50.bytes)
    assert parse("bf16").bytes_per_step(4, RESNET50) == ring_bytes(4, RESNET50.bytes / 2)
    double = Payload(RESNET50.bytes * 2, width=8)
    assert parse("fp16").bytes_per_step(4, double) == ring_bytes(4, RESNET50.bytes / 2)


def test_gpus_of_a_machine_that_sum_among_themselves_send_no_more_than_one():
    for spec in ("ef:2", "localsgd:8", "overlap:3:int8"):
        strategy = parse(spec)
        assert strategy.bytes_per_step(2, RESNET50, gpus=4) == strategy.bytes_per_step(2, RESNET50)
    # A ring over all ranks goes out of each machine once.
    assert parse("bf16").bytes_per_step(2, RESNET50, gpus=4) == ring_bytes(8, RESNET50.bytes / 2)
    assert parse("allreduce").bytes_per_step(1, RESNET50, gpus=4) == 0


def test_one_rank_sends_nothing():
    assert parse("allreduce").bytes_per_step(1, RESNET50) == 0
