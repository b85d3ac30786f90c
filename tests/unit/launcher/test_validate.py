"""What a node tells, at the border: 100 and more generated cases for each parser, none of which may
do anything but be taken as true or be refused."""

import base64
import contextlib
import json
import re
import tracemalloc
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract import validate
from contract.errors import UserError
from contract.options import Config
from contract.text import clean
from contract.validate import Invalid
from launcher import collect, judge, look, measure
from launcher.engines import ssh
from launcher.look import Control, OpenMachines, Requirements
from launcher.terminal import Terminal
from launcher.watch import attempts
from launcher.watch.guards import LARGEST, ONCE, Frames, shapes
from launcher.watch.lines import RunLogs
from tests import fuzz
from tests.unit.launcher.launcher_values import ANSWER as TOLD
from tests.unit.launcher.launcher_values import SETTINGS, build, card, facts, gpus, host

RANKS = (2, 3)
many = fuzz.many(100)

HELLO = {"type": "hello", "protocol": 2, "way": "service"}
WORKER = {"exit_code": 1, "signal": None, "exception": "E: x"}
GOOD = (
    {"type": "started", "pid": 7, "mono_start": 1.5},
    {"type": "worker", "rank": 2, "pid": 8},
    {"type": "log", "rank": 3, "stream": "stdout", "bytes": 3},
    {"type": "log", "rank": None, "stream": "stderr", "bytes": 3},
    {"type": "beat", "unix": 1.0, "running": [2, 3]},
    {"type": "record", "file": "machine.1.jsonl", "offset": 0, "bytes": 3},
    {"type": "worker_exit", "rank": 3, "first": True, **WORKER},
    {"type": "trouble", "what": "disk", "message": "full"},
    {
        "type": "exit",
        "reason": "failed",
        "message": None,
        "exit_code": None,
        "signal": "SIGKILL",
        "mono_start": 0.0,
        "mono_end": 2,
        "workers": {"2": WORKER},
        "ended": [{"pid": 9, "command": "x"}],
        "left": [],
    },
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["../../x", "\x1b]52;c;eA==\x07", "rank", 2**70, -1, 1e400, "9" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


# Python's recursion allows to read it, but not to look through it; with half a surrogate.
NESTED = "[" * 600 + '"\\ud800"' + "]" * 600


def wire(*frames):
    lines = [json.dumps(frame).encode() + b"\n" for frame in frames]
    payloads = [b"abc" if "bytes" in frame else b"" for frame in frames]
    return b"".join(line + payload for line, payload in zip(lines, payloads))


def read(data, size=1 << 16):
    frames, found = Frames(RANKS), []
    for start in range(0, len(data), size):
        found += frames.feed(data[start : start + size])
    return found


@pytest.mark.parametrize("good", GOOD, ids=lambda frame: frame["type"])
def test_a_frame_without_a_field_is_refused(good):
    for name in set(good) - {"type"}:
        less = {key: value for key, value in good.items() if key != name}
        with pytest.raises(Invalid, match=name):
            read(wire(HELLO) + json.dumps(less).encode() + b"\n")


WHOLE_EXIT = GOOD[-1]


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ('{"type": "beat", "unix": 1%s, "running": [], "disk_free": 1}' % ("0" * 900_000), None),
        ('{"type": "beat", "unix": NaN, "running": [], "disk_free": 1}', "unix"),
        (f'{{"type": "beat", "unix": {NESTED}, "running": [], "disk_free": 1}}', None),
        (f'{{"type": {NESTED}}}', None),
        ('{"type": ["log"]}', None),
        ('{"type": "upgrade"}', None),
        ('{"type": "log", "rank": 7, "stream": "stdout", "bytes": 3}', "rank"),
        ('{"type": "log", "rank": "../../x", "stream": "stdout", "bytes": 3}', "rank"),
        ('{"type": "log", "rank": true, "stream": "stdout", "bytes": 3}', "rank"),
        ('{"type": "log", "rank": 2, "stream": "stdout", "bytes": -3}', "bytes"),
        ('{"type": "log", "rank": 2, "stream": "stdout", "bytes": 99999999999}', "bytes"),
        ('{"type": "log", "rank": 2, "stream": "stdin", "bytes": 3}', "stream"),
        ('{"type": "trouble", "what": "x", "message": {"a": 1}}', "message"),
        (json.dumps({**GOOD[6], "exit_code": "1"}), "exit_code"),
        (json.dumps({**WHOLE_EXIT, "left": ["x"]}), "left"),
        (json.dumps({**WHOLE_EXIT, "reason": "because"}), "reason"),
        ("y" * (2 << 20), "a line of more than 1 MiB"),
    ],
    ids=lambda text: str(text)[:60],
)
def test_a_frame_that_no_guard_sends_is_refused(odd, why):
    with pytest.raises(Invalid, match=why):
        read(wire(HELLO) + odd.encode() + b"\nabc")


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"y\n" * (1 << 20), r"before its first frame: does a \.bashrc print"),
        (b"y" * (2 << 20), "a line of more than 1 MiB"),
        (wire(HELLO, GOOD[-1], GOOD[4]), "after its exit frame one of type 'beat'"),
    ],
)
def test_before_the_first_frame_and_after_the_last_one_nothing_comes(sent, why):
    with pytest.raises(Invalid, match=why):
        read(sent)


def test_what_no_shape_has_is_left_out_and_every_text_can_be_written():
    more = '{"type": "trouble", "what": "disk", "message": "full \\ud800", "x": HERE}\n'
    (_, (frame, _)) = read(wire(HELLO) + more.replace("HERE", NESTED).encode())
    assert frame == {"type": "trouble", "what": "disk", "message": "full \ufffd"}


@pytest.mark.parametrize("again", [frame for frame in (HELLO, *GOOD) if frame["type"] in ONCE])
def test_what_a_guard_sends_once_is_not_taken_twice(again):
    kind, rank = again["type"], again.get("rank")
    says = f"a second {kind} frame" if rank is None else f"a second {kind} frame of rank {rank}"
    says = "after its exit frame" if kind == "exit" else says
    with pytest.raises(Invalid, match=says):
        read(wire(HELLO, again, again))
    # A frame of the other rank is another one.
    others = [{**again, "rank": rank} for rank in RANKS] if rank is not None else []
    assert len(read(wire(HELLO, *others))) == 1 + len(others)


TASK = {"peers": ["192.0.2.1"], "packages": ["timm"], "ports": [29500, 29501, 29502]}
ANSWER = {**TOLD, "machine": "m"}


def test_an_answer_is_of_what_was_asked_and_nothing_else():
    more = {"missing": ["timm", "os"], "free_ports": [29502, 22], "hostname": "x", "host": "node9"}
    more["interfaces"] = {"192.0.2.1": "eno1", "192.0.2.9": None}
    facts = look.read_facts(json.dumps({**ANSWER, **more}), TASK)
    assert (facts.cores, facts.missing, facts.free_ports) == (8, ["timm"], [29502])
    assert facts.interfaces == {"192.0.2.1": "eno1"} and not hasattr(facts, "hostname")


@pytest.mark.parametrize("name", ["interfaces", "versions", "gpus", "data"])
def test_an_answer_says_all_that_was_asked(name):
    for asked in ANSWER[name]:
        less = {key: value for key, value in ANSWER[name].items() if key != asked}
        with pytest.raises(Invalid, match=re.escape(f"answer.{name}.{asked} is missing")):
            look.read_facts(json.dumps({**ANSWER, name: less}), TASK)


def test_a_machine_has_as_many_cards_as_a_machine_may_have():
    with pytest.raises(Invalid, match=r"answer\.gpus\.cards are 65"):
        look.read_facts(json.dumps({**ANSWER, "gpus": gpus(65)}), TASK)


@pytest.mark.parametrize("part", ["[]", '{"":0}', '"\\ud800"'])
def test_memory_is_bounded_by_what_came(part):
    text = "[" + f"{part}," * ((1 << 20) // (len(part) + 1)) + "0]"
    whole = json.dumps({**ANSWER, "models": "HERE"}).replace('"HERE"', text)
    tracemalloc.start()
    try:
        with contextlib.suppress(Invalid):
            look.read_facts(whole, TASK)
        assert tracemalloc.get_traced_memory()[1] < 30 * len(whole)
    finally:
        tracemalloc.stop()


def test_a_machine_has_as_many_packages_as_a_machine_may_have():
    """Of each a file is made for pip: 100,000 names were 390 MiB."""
    most = {f"a{number}": "1" for number in range(look.MOST_PACKAGES)}
    whole = json.dumps({**ANSWER, "distributions": most})
    assert len(look.read_facts(whole, TASK).distributions) == look.MOST_PACKAGES
    with pytest.raises(Invalid, match=r"answer.distributions is "):
        look.read_facts(json.dumps({**ANSWER, "distributions": {**most, "b": "1"}}), TASK)


@pytest.mark.parametrize("name", ANSWER)
def test_what_is_nested_without_end_is_no_answer(name):
    whole = json.dumps({**ANSWER, name: "HERE"})
    for what in (NESTED, "[" * 100_000, "1" * 1_000_000):
        with pytest.raises(Invalid):
            look.read_facts(whole.replace('"HERE"', what), TASK)
    with pytest.raises(Invalid, match=r"answer is \[\["):
        look.read_facts(NESTED, TASK)


FULL = {
    **ANSWER,
    "gpus": gpus(
        2,
        cards=[card(0, sm=86), card(1, sm=86)],
        processes=[{"pid": 7, "user": "ann", "command": "x"}],
        on_bus=2,
    ),
    "cpu_flags": ["amx_bf16"],
    "runs": [{"pid": 7, "run": "r", "holder": "ann@desk"}],
}
ODD = ("12.8", "²", "GPU-0a", "/srv", "2.15.0", 29500, {"images": 1}, "-1", 63, 75, 999, True)


@fuzz.many(400)
@example({**FULL, "versions": {**FULL["versions"], "cuda": "²"}}, "auto", "")
@given(fuzz.odd(FULL, ODD), st.sampled_from(["auto", "cuda", "cpu"]), st.sampled_from(["", "0"]))
def test_what_was_taken_of_an_odd_answer_ends_no_plan(answer, device, visible):
    """From the border on, facts are trusted: whatever passes it is a plan, or a sentence."""
    try:
        found = look.read_facts(json.dumps(answer), TASK)
    except Invalid:
        return
    assert found.home.startswith("/") and "\n" not in found.home
    assert len(found.gpus.cards) <= 64
    known = {"node1": replace(found, host="node1"), "node2": facts(2)}
    env = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    hosts = [host(1, env=env, cuda_home="/usr/local/cuda"), host(2)]
    chosen = {"device": device, "output": "."}
    asked = Requirements(Config(), replace(SETTINGS, **chosen))
    with contextlib.suppress(UserError):
        for some in (hosts[:1], hosts):
            judge.problems(OpenMachines(some, {}, known), asked, Control(1 << 40))
        measure.timetables(hosts, known)
        json.dumps(build(hosts, [*known.values()], settings=chosen).document())


@fuzz.many(300)
@given(st.sampled_from(GOOD).flatmap(lambda good: fuzz.odd(good, ODD)))
def test_an_odd_frame_is_true_or_refused(frame):
    text = wire(HELLO) + json.dumps(frame).encode() + b"\nabc"
    known = shapes(RANKS)
    with contextlib.suppress(Invalid):
        for taken, payload in read(text):
            json.dumps(taken).encode()
            assert taken.keys() <= known[taken["type"]].keys() | {"type"}
            assert taken.get("rank") in (*RANKS, None) and len(payload) <= LARGEST


@many
@given(st.text() | values.map(json.dumps))
@example('[{"address": "192.0.2.1", "port": 1, "why": "x"}]')
def test_any_text_is_an_answer_or_refused(text):
    with contextlib.suppress(Invalid):
        look.read_facts(text, TASK)
    told = look.read_unreached(text.encode(errors="replace"), {"192.0.2.1"})
    assert isinstance(told, str) or all(one.address == "192.0.2.1" for one in told)


def way(address="192.0.2.1", port=1):
    return {"address": address, "port": port, "why": "no route"}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([way()], None),
        ([way("192.0.2.7")], "it names a machine twice, or one that it was not asked for"),
        ([way(port=0)], "its answer[0].port is 0, and one of range(1, 65536) was expected"),
        ([way(), way(port=2)], "it names a machine twice, or one that it was not asked for"),
        (NESTED, "its answer[0] is [["),
        ("[" * 100_000, "it is no JSON"),
    ],
)
def test_what_a_machine_says_of_its_peers(said, told):
    line = said if isinstance(said, str) else json.dumps(said)
    found = look.read_unreached(line.encode(), {"192.0.2.1": "node1"})
    if told is None:
        assert found == [look.Unreached(**one) for one in said]
    else:
        assert found.startswith(f"what it says is impossible ({told}")


# A public key: 32 bytes of which none is secret.
KEY = base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + bytes(range(32)))
KNOWN = b"192.0.2.7 ssh-ed25519 " + KEY
TERMINAL = re.compile("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\ud800-\udfff]")
COLOUR = re.compile(r"\x1b\[[0-9;:]{0,40}m")
escapes = st.lists(
    st.sampled_from(["\x1b", "[", "]", "0;t", "\x07", "\x1b\\", "31m", "\x9b", "\r", "c", "é", "P"])
    | st.characters(),
    max_size=20,
).map("".join)


@many
@given(escapes)
def test_only_tabs_newlines_and_colours_reach_the_terminal(text):
    shown = clean(text)
    assert not TERMINAL.search(shown)
    assert "\x1b" not in COLOUR.sub("", shown)
    shown.encode()
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]52;c;cm0gLXJm\x07clipboard", "clipboard"),
        ("\x1b]52;c;cm0gLXJm\x1b\\clipboard", "clipboard"),
        ("\x1b[2J\x1b[Hscreen", "screen"),
        ("\x1b[6nask", "ask"),
        ("\x1bPq sixel\x1b\\after", "after"),
        ("\x9b31mc1", "c1"),
        ("a\u202eb", "ab"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
        ("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"),
        ("tab\tand\nline", "tab\tand\nline"),
    ],
)
def test_escapes(said, shown):
    assert clean(said) == shown


PRINTED = st.sampled_from([b"\n", b"\r", b"x" * 5000, b"x" * 300_000])


@many
@given(
    st.lists(st.binary(max_size=40) | escapes.map(lambda t: t.encode(errors="replace")) | PRINTED),
    st.integers(1, 1 << 20),
)
def test_any_output_of_a_rank_is_shown_clean(tmp_path_factory, pieces, limit):
    folder = tmp_path_factory.mktemp("run")
    with (folder / "screen").open("w+", encoding="utf-8") as screen:
        terminal = Terminal(screen)
        terminal.keep_in(folder / "controller.log")
        logs = RunLogs(folder, terminal, 4, limit)
        for piece in pieces:
            logs.feed("node1", 2, "stdout", piece)
        logs.close()
        assert terminal.drain()
    for path in (folder / name for name in ("screen", "controller.log", "nodes/node1/rank2.log")):
        if path.exists():
            assert not TERMINAL.search(path.read_text().replace("\r\x1b[K", ""))
    assert path.stat().st_size < limit + 4096 if path.exists() else True


@many
@given(st.binary(max_size=200))
def test_no_line_of_known_hosts_hides_a_confirmed_key(data):
    found = ssh.read_known_hosts(data + b"\n" + KNOWN + b"\n" + data)
    (line,) = [line for line in found if line.means("192.0.2.7") and not line.revoked]
    assert line.entry.to_line().encode().split() == KNOWN.split()


@many
@given(st.lists(st.binary(max_size=60) | values.map(lambda v: json.dumps(v).encode()), max_size=5))
def test_any_timings_are_read(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("run") / "rank0.1.steps.jsonl"
    good = b'{"kind": "start", "attempt": 1, "resumed_samples": 8}'
    odd = b'{"kind": "start", "x": %s}' % NESTED.encode()
    path.write_bytes(b"\n".join([*lines, b'["start"]', odd, good]) + b"\n")
    assert [line["resumed_samples"] for line in attempts.lines_of(path, attempts.START)][-1:] == [8]


@many
@given(st.lists(st.text(max_size=30), max_size=5))
def test_any_names_of_checkpoints_are_read(names):
    tip = collect.newest(names)
    assert tip is None or re.fullmatch(r"step-[0-9]+\.pt", tip[1])


@dataclass(frozen=True)
class Pair:
    a: Annotated[str, validate.Match("[a-z]+")] | None
    b: list[int]
    c: dict[str, bool] = field(default_factory=dict)


# A shape with a value that has it: parts of each kind that a shape may have.
PARTS = {
    "bool": (bool, True),
    "int": (int, -7),
    "float": (float, 0.5),
    "str": (str, "x"),
    "none": (None, None),
    "match": (validate.Match("[a-z]+"), "abc"),
    "one": (validate.One(("a", 3)), "a"),
    "range": (validate.One(range(9)), 8),
    "list": ([int], [1, 2]),
    "data": (Pair, {"a": "x", "b": [7]}),
    "each": (validate.Each((None, [str])), {"a": None, "b": ["c"]}),
    "fields": ({"a": {"b": int}}, {"a": {"b": 1}, "more": 2}),
    "either": ((None, int, [int]), [3]),
}
WHOLE = {name: part for name, (_, part) in PARTS.items()}


@fuzz.many(400)
@example({**WHOLE, "each": {"k" * 5000: None}})
@example({**WHOLE, "list": [1] * (validate.MANY + 1)})
@given(fuzz.odd(WHOLE, ("abc", 3, [1, "a"], {"a": ["\ud800"]}, "y" * 5000)))
def test_each_kind_of_part_has_its_shape_or_is_refused(document):
    shape = {name: part for name, (part, _) in PARTS.items()}
    document = json.loads(json.dumps(document))
    try:
        found = validate.check(document, shape, "it")
    except Invalid as error:
        assert str(error).startswith("it") and len(str(error)) < 5000
        return
    found["data"] = asdict(found["data"])
    assert found.keys() == shape.keys()
    again = validate.check(found, shape, "it")
    assert {**again, "data": asdict(again["data"])} == found
    json.dumps(found).encode()


WORDS = (
    *(b"", b"# said", b"@revoked", b"@cert-authority", b"node1,!node2", b"node*", b"|1|a|b"),
    *(b"|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg=", b"[192.0.2.7]:2222"),
    *(b"192.0.2.7", b"ssh-ed25519", b"ssh-rsa", KEY, KEY[:9], b"\xff"),
)


@many
@given(
    st.lists(
        st.sampled_from(WORDS),
        max_size=5,
    ).map(b" ".join),
    st.sampled_from(["192.0.2.7", "node1", "node2", "[192.0.2.7]:2222"]),
)
@example(b"@revoked node*,!node2 ssh-ed25519 " + KEY, "node2")
@example(b"node*,!node2 ssh-ed25519 " + KEY, "node1")
@example(b"|1|a|b ssh-ed25519 " + KEY, "node1")
def test_a_line_of_known_hosts_made_of_its_parts(line, name):
    for found in ssh.read_known_hosts(line):
        assert found.entry.key is not None
        assert found.means(name) in (True, False)


@many
@given(
    st.lists(st.sampled_from([wire(HELLO), *map(wire, GOOD), b"", b"hi\n", b'{"x"\n', b"[]\n"])),
    st.integers(1, 99) | st.just(1 << 20),
)
@example([b"y" * (2 << 20)], 1 << 20)
@example([b"y\n" * (1 << 20)], 1 << 20)
@example([wire(HELLO), wire(GOOD[2])], 9)
@example([wire(HELLO), wire(GOOD[-1]), wire(GOOD[4])], 99)
def test_frames_in_any_order_are_read_or_refused(sent, size):
    frames = Frames(RANKS)
    data = b"".join(sent)
    with contextlib.suppress(Invalid):
        for start in range(0, len(data), size):
            for frame, _ in frames.feed(data[start : start + size]):
                assert frame["type"] == "hello" or sent.index(wire(HELLO)) >= 0
    assert isinstance(frames.rest(), str)
