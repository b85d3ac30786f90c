"""Each case is refused, or named; how it is said is reviewed in tests/messages/ansible.txt."""

import pytest

from tests.messages.ansible import REFUSALS


@pytest.mark.parametrize("case", REFUSALS)
def test_it_is_refused(case):
    assert REFUSALS[case]()
