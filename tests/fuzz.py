"""What fuzzers of readers share: documents with odd parts, and damaged bytes, always the same ones.

`make test` makes an eighth of them, `make test-all ONLY=fuzzers` all. `python -m pytest tests/unit
--hypothesis-seed=N` tries others.
"""

import copy
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

WHOLE = "TANDEM_FUZZ"  # set: every example


def many(examples):
    return settings(
        max_examples=examples if WHOLE in os.environ else max(10, examples // 8),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


PLAIN = (
    None, True, -1, 0, 2**53, 2**63, 10**400, 1e300, 1e-320, -0.5, float("nan"), float("inf"), "",
    "x", "²", "\ud800", "\x1b]0;x\x07", "../x", "1" * 5000, [], {}, [[]], [None], {"a": 1},
    ["x"] * 99,
)  # fmt: skip


def nudged(value):
    """Another value of the same kind: what is well formed and yet not true is refused later."""
    if isinstance(value, (bool, type(None))):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value[1:] if len(value) % 2 else f"{value}x"
    return value[:-1] if isinstance(value, list) else value


def places(value, at=()):
    """The path of each part of a document."""
    keys = range(len(value)) if isinstance(value, list) else ()
    for key in value if isinstance(value, dict) else keys:
        yield (*at, key)
        yield from places(value[key], (*at, key))


def odd(document, more=()):
    """Copies in which one to three parts are missing, another value, or beside a stranger. A
    function in `more` makes the value of what was there."""
    every = list(places(document))
    # What holds much is as likely as what lies deep in it, of which there is more.
    levels = [[path for path in every if len(path) == n] for n in {len(path) for path in every}]
    place = st.one_of(*map(st.sampled_from, levels))
    values = st.sampled_from([*PLAIN, *more])
    change = st.tuples(place, st.sampled_from(("set", "drop", "add", "nudge")), values)
    return st.lists(change, min_size=1, max_size=3).map(lambda changes: _changed(document, changes))


def _changed(document, changes):
    made = copy.deepcopy(document)
    for path, action, value in changes:
        at = made
        for key in path[:-1]:
            try:
                at = at[key]
            except (LookupError, TypeError):
                at = None
        if not isinstance(at, (dict, list)):
            continue
        if isinstance(at, list) and not (isinstance(path[-1], int) and path[-1] < len(at)):
            continue
        _change(at, path[-1], nudged if action == "nudge" else value, action)
    return made


def _change(at, key, value, action):
    there = isinstance(at, list) or key in at
    if callable(value):
        at[key] = value(at[key]) if there else None
    elif action == "set":
        at[key] = copy.deepcopy(value)  # a later change may lie within it
    elif action == "add" and isinstance(at, dict):
        at[value if isinstance(value, (str, int)) else "stranger"] = copy.deepcopy(value)
    elif there:
        del at[key]


def damaged(raw):
    """The bytes of a file with some of them changed, most often near its end; cut; or longer."""
    place = st.integers(0, len(raw) - 1) | st.integers(max(0, len(raw) - 4000), len(raw) - 1)
    flips = st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=20)
    cuts = st.integers(0, len(raw) - 1)
    return (
        flips.map(lambda found: _flipped(raw, found))
        | cuts.map(lambda end: raw[:end])
        | (st.binary(min_size=1, max_size=200).map(lambda more: raw + more))
    )


def _flipped(raw, found):
    made = bytearray(raw)
    for place, byte in found:
        made[place] = byte
    return bytes(made)
