"""What `make check`, `make accept` and Ansible's roles say of machines."""

from planning import health, preflight
from tests.unit.ansible import test_health
from tests.unit.ansible.provision_machines import machine
from tests.unit.ansible.refusals import REFUSALS
from tests.unit.ansible.test_provision_preflight import ILL, SSH, of_ssh, two_cards

network = preflight.network


def findings():
    """(code, finding) of each fault, planted alone."""
    for case, (facts, question) in ILL.items():
        fault = case.partition(",")[0]
        found = preflight.findings(facts, question)
        yield from ((case, one) for one in found if one["fault"] == fault)
    two = network.duplicates([machine(), machine(host="node2")])
    two += network.faster_cards([two_cards(n) for n in (1, 2)])[:1]
    for case, changes in test_health.ILL.items():
        two += [{**one, "fault": case} for one in health.findings(test_health.row(**changes))]
    two.append(preflight.not_collected("node1", "python3:\nnot found"))
    yield from ((one["fault"], one) for one in two)


def render():
    sentences = {code: preflight.text(one) for code, one in findings()}
    sentences |= {fault: network.set_aside(of_ssh(said)) for said, fault in SSH.items()}
    return sentences | {code: call() for code, call in REFUSALS.items()}
