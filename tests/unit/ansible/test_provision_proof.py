"""What site.yml computes at its end on each machine, and over all of them; here on the CPU. In the
lab several machines do (tests/lab/test_site.py)."""

import json

import pytest

from planning import reading
from tests.unit.ansible.provision_machines import load

torch = pytest.importorskip("torch")
free_port = pytest.importorskip("tests.trainer_ranks").free_port


@pytest.fixture
def proof():
    return load("ansible/roles/prove/files/proof.py")


def test_a_cpu_multiplies_in_fp32_and_says_that_it_is_one(proof):
    assert proof.cards(0) == {"names": ["its CPU"], "precisions": ["fp32"]}


def test_a_product_that_is_wrong_ends_it(proof, monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(SystemExit, match="fp32 is wrong"):
        proof.cards(0)


def test_a_card_that_torch_does_not_see_is_said(proof, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="sees 1 of 2 cards"):
        proof.cards(2)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_sum_is_compared_with_what_it_has_to_be(proof, monkeypatch, wrong):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    if wrong:
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.add_(1))
    try:
        assert proof.total("gloo", 0, 1, "127.0.0.1", free_port()) == {"backend": "gloo"}
    except SystemExit as ended:
        torch.distributed.destroy_process_group()
        assert wrong and "its sum is 2.0 instead of 1.0" in str(ended)
    else:
        assert not wrong


def test_only_what_a_machine_proves_counts():
    good = json.dumps({"names": ["its CPU"], "precisions": ["fp32"], "more": 1})
    answers = {
        "pc1": {"rc": 0, "stdout": good},
        "pc2": {"rc": 1, "stdout": good},
        "pc3": {"rc": 0, "stdout": '{"names": 5}'},
        "pc4": {"rc": 0, "stdout": "no JSON"},
    }
    machines = [{"inventory_hostname": n, "prove_cards": done} for n, done in answers.items()]
    (row,) = reading.proven([*machines, {"inventory_hostname": "pc5"}])
    assert row == {"host": "pc1", "names": ["its CPU"], "precisions": ["fp32"]}
