"""Steps that share a line of a rank's record."""

import pytest

from tandem.step_lines import Block


def lines_of(lengths, epochs=None):
    """The lines of steps that take so long."""
    block, lines = Block(), []
    for step, length in enumerate(lengths, 1):
        seconds = {"forward": 0.75 * length, "sync_exposed": 0.25 * length}
        done = block.add({"kind": "step", "step": step, "samples": 8, "seconds": seconds})
        lines += [done] if done else []
    return lines, block.close()


@pytest.mark.parametrize("length", [0.001, 0.1, 0.6])
def test_a_loop_writes_two_lines_a_second_at_most_and_loses_nothing(length):
    lengths = [length] * max(20, int(30 / length))
    lines, left = lines_of(lengths)
    every = [*lines, left] if left else lines
    assert sum(line["steps"] for line in every) == len(lengths)
    assert sum(line["samples"] for line in every) == 8 * len(lengths)
    assert sum(sum(line["seconds"].values()) for line in every) == pytest.approx(sum(lengths))
    assert len(lines) <= 2 * sum(lengths) + 16  # while its pace is not known yet
    if length >= 0.5:
        assert all(line["steps"] == 1 for line in every)


def test_ranks_end_lines_at_the_same_steps_though_they_are_not_equally_fast():
    ends = [
        {line["step"] for line in lines_of([0.004 * (1 + noise * (n % 3)) for n in range(9000)])[0]}
        for noise in (0.0, 0.2, 0.05)
    ]
    assert len(set.intersection(*ends)) > 0.9 * len(ends[0])


def test_a_loop_that_becomes_slow_keeps_no_line_for_long():
    lines, _ = lines_of([0.002] * 3000 + [2.0] * 20)
    slow = [line for line in lines if line["step"] > 3001]
    assert len(slow) >= 18 and all(line["steps"] <= 2 for line in slow)


def test_the_longest_step_is_known():
    lines, _ = lines_of([0.01] * 200 + [0.3] + [0.01] * 200)
    assert max(line["longest"] for line in lines) == pytest.approx(0.3)
