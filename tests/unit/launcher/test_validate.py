"""What a node tells, at the border: 100 and more generated cases for each parser, none of which may
do anything but be taken as true or be refused."""

import base64
import contextlib
import json
import re
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract import validate
from contract.errors import UserError
from contract.text import clean
from contract.validate import Invalid
from launcher import collect, measure
from launcher.background import Sizes
from launcher.machines import probe
from launcher.machines.engines import ssh
from launcher.machines.probe import Facts
from launcher.options import Options
from launcher.plan import preflight
from launcher.plan.preflight import OpenMachines, Requirements
from launcher.terminal import Terminal
from launcher.watch import attempts
from launcher.watch.guards import LARGEST, ONCE, Frames, shapes
from launcher.watch.lines import RunLogs
from tests import fuzz
from tests.unit.launcher.launcher_values import CODE, SETTINGS, build, card, facts, gpus, host

RANKS = (2, 3)
many = fuzz.many(100)

HELLO = {"type": "hello", "protocol": 1, "way": "service"}
WORKER = {"exit_code": 1, "signal": None, "exception": "E: x"}
GOOD = (
    {"type": "started", "pid": 7, "mono_start": 1.5},
    {"type": "worker", "rank": 2, "pid": 8},
    {"type": "log", "rank": 3, "stream": "stdout", "bytes": 3},
    {"type": "log", "rank": None, "stream": "stderr", "bytes": 3},
    {"type": "beat", "unix": 1.0, "running": [2, 3], "disk_free": None},
    {"type": "begun", "rank": 2, "run": "r", "bytes": 3},
    {
        "type": "digest",
        "run": "r",
        "mono": 1.5,
        "ranks": [
            {"rank": 2, "phase": "steady", "step": 7, "epoch": 0, "steps": 2, "samples": 64},
            {"rank": 3, "beside": [0, 5], "evaluated": {"epoch": 0, "top1": 0.5}, "loss": 0.25},
        ],
        "machine": {"cpu": 50.0, "disk": [5.0, 7, 8], "gpus": [[0, 99.0, 5, None, None, None]]},
    },
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
    frames, found = Frames(RANKS, "r"), []
    for start in range(0, len(data), size):
        found += frames.feed(data[start : start + size])
    return found


def test_every_frame_of_ours_passes():
    found = read(wire(HELLO, *GOOD))
    assert [frame["type"] for frame, _ in found] == [frame["type"] for frame in (HELLO, *GOOD)]


@many
@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_are_frames_or_refused(data, size):
    for before in (b"", wire(HELLO)):
        with contextlib.suppress(Invalid):
            for frame, _ in read(before + data, size):
                assert frame["type"] in {"hello", *(good["type"] for good in GOOD)}


@many
@given(st.data())
def test_a_frame_with_a_wrong_field_is_true_or_refused(data):
    frame = dict(data.draw(st.sampled_from(GOOD)))
    name = data.draw(st.sampled_from(sorted(frame)))
    frame[name] = data.draw(values)
    sent = wire(HELLO) + json.dumps(frame).encode() + b"\n" + b"abc"
    try:
        found = read(sent)
    except Invalid:
        return
    for got, payload in found[1:]:
        if got["type"] in ("log", "worker", "worker_exit"):
            assert got["rank"] in (*RANKS, None) and not isinstance(got["rank"], bool)
        assert len(payload) <= LARGEST


@pytest.mark.parametrize("good", GOOD, ids=lambda frame: frame["type"])
def test_a_frame_without_a_field_is_refused(good):
    for name in set(good) - {"type"}:
        with pytest.raises(Invalid, match=name):
            read(
                wire(HELLO)
                + json.dumps({k: v for k, v in good.items() if k != name}).encode()
                + b"\n"
            )


@pytest.mark.parametrize(
    "odd",
    [
        b'["start"]\n' * 3,
        b'{"type": "beat\n{"no": "type"}\n{}\n',
        b"[" * 100_000 + b"\n",
        b'{"type": %s}\n' % NESTED.encode(),
        b'{"type": "beat", "unix": %s, "running": [], "disk_free": 1}\n' % NESTED.encode(),
        b'{"type": "beat", "unix": 1%s, "running": [], "disk_free": 1}\n' % (b"0" * 900_000),
        b'{"type": ["log"]}\n',
        b'{"type": "log", "rank": 7, "stream": "stdout", "bytes": 3}\nabc',
        b'{"type": "log", "rank": "../../x", "stream": "stdout", "bytes": 3}\nabc',
        b'{"type": "log", "rank": true, "stream": "stdout", "bytes": 3}\nabc',
        b'{"type": "log", "rank": 2, "stream": "stdout", "bytes": -3}\nabc',
        b'{"type": "log", "rank": 2, "stream": "stdout", "bytes": 99999999999}\nabc',
        b'{"type": "log", "rank": 2, "stream": "stdin", "bytes": 3}\nabc',
        b'{"type": "exit"}\n',
        b'{"type": "worker_exit", "rank": 2}\n',
        b'{"type": "beat", "unix": NaN, "running": [], "disk_free": 1}\n',
        b"y\n" * (1 << 20),
        b"y" * (2 << 20),
    ],
)
def test_odd_frames(odd):
    with contextlib.suppress(Invalid):
        for frame, _ in read(wire(HELLO) + odd):
            assert frame["type"] in ("hello", "log")
            assert frame.get("rank") is None


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


def test_nothing_comes_after_the_last_frame():
    with pytest.raises(Invalid, match="after its exit frame one of type 'beat'"):
        read(wire(HELLO, GOOD[-1], GOOD[4]))


def test_a_flood_before_hello_is_cut_off():
    with pytest.raises(Invalid, match=r"before its first frame: does a \.bashrc print"):
        read(b"y\n" * (1 << 20))
    with pytest.raises(Invalid, match="a line of more than 1 MiB"):
        read(b"y" * (2 << 20))


TASK = {
    **{"peers": ["192.0.2.1"], "packages": ["timm"], "paths": ["/usr/local/cuda/bin"]},
    **{"ports": [29500, 29501, 29502], "data": "/d"},
}
ANSWER = {name: getattr(facts(1), name) for name in probe.shape(TASK)}
ANSWER["versions"] = {**dict.fromkeys(probe.VERSIONS), **ANSWER["versions"]}
ANSWER.update(packages={"timm": True}, paths={"/usr/local/cuda/bin": True})


def test_an_answer_of_ours_passes():
    assert probe.read_facts(json.dumps(ANSWER), TASK)["cores"] == 8


@pytest.mark.parametrize("name", ["packages", "paths", "routes", "versions"])
def test_an_answer_says_all_that_was_asked_and_nothing_else(name):
    for asked in ANSWER[name]:
        less = {key: value for key, value in ANSWER[name].items() if key != asked}
        with pytest.raises(Invalid, match=re.escape(f"answer.{name}.{asked} is not")):
            probe.read_facts(json.dumps({**ANSWER, name: less}), TASK)
    more = {**ANSWER[name], "more": next(iter(ANSWER[name].values()))}
    assert probe.read_facts(json.dumps({**ANSWER, name: more}), TASK)[name] == ANSWER[name]


@pytest.mark.parametrize("part", ["[]", "{}", '{"":0}', "0", '""', "1e1", '"\\ud800"', '"é"'])
def test_memory_is_bounded_by_what_came(part):
    text = "[" + f"{part}," * ((1 << 20) // (len(part) + 1)) + "0]"
    whole = json.dumps({**ANSWER, "models": "HERE"}).replace('"HERE"', text)
    tracemalloc.start()
    try:
        with contextlib.suppress(Invalid):
            probe.read_facts(whole, TASK)
        assert tracemalloc.get_traced_memory()[1] < 30 * len(whole)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ANSWER)
def test_what_is_nested_without_end_is_no_answer(name):
    whole = json.dumps({**ANSWER, name: "HERE"})
    for what in (NESTED, "[" * 100_000, "1" * 1_000_000):
        with pytest.raises(Invalid):
            probe.read_facts(whole.replace('"HERE"', what), TASK)
    with pytest.raises(Invalid, match=r"answer is \[\["):
        probe.read_facts(NESTED, TASK)


@many
@given(st.sampled_from(sorted(ANSWER)), values)
def test_an_answer_with_a_wrong_field_is_true_or_refused(name, value):
    with contextlib.suppress(Invalid):
        found = probe.read_facts(json.dumps({**ANSWER, name: value}), TASK)
        assert found["home"].startswith("/") and "\n" not in found["home"]
        assert len(found["gpus"]["cards"]) == found["gpus"]["count"] < 1024


FULL = {
    **ANSWER,
    "gpus": gpus(
        2,
        cards=[card(0, sm=86), card(1, sm=86)],
        processes=[{"pid": 7, "user": "ann", "command": "x"}],
        cards_on_bus=2,
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
        found = probe.read_facts(json.dumps(answer), TASK)
    except Invalid:
        return
    other = facts(2, packages={"timm": True})
    times = {"asked_unix": 100.0, "answered_unix": 100.1}
    known = {"node1": Facts(host="node1", **times, **found), "node2": other}
    env = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    hosts = [host(1, env=env, cuda_home="/usr/local/cuda"), host(2)]
    chosen = {"device": device, "output": "."}
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(UserError):
        patch.setattr(probe, "check_ways", lambda *_: [])
        patch.setattr(preflight.code, "current", lambda *_: CODE)
        asked = Requirements(Options(), replace(SETTINGS, **chosen))
        preflight.check(OpenMachines(hosts[:1], {}, known), asked)
        preflight.check(OpenMachines(hosts, {}, known), asked)
        measure.timetables(hosts, known)
        json.dumps(build(hosts, [*known.values()], settings=chosen).document())


@fuzz.many(300)
@given(st.sampled_from(GOOD).flatmap(lambda good: fuzz.odd(good, ODD)))
def test_an_odd_frame_is_true_or_refused(frame):
    text = wire(HELLO) + json.dumps(frame).encode() + b"\nabc"
    with contextlib.suppress(Invalid):
        for taken, _ in read(text):
            json.dumps(taken).encode()
            assert taken["type"] == "hello" or taken.keys() <= shapes(RANKS, "r")[
                taken["type"]
            ].keys() | {"type"}


@many
@given(st.text() | values.map(json.dumps))
@example('[[["192.0.2.1", 1], "x"], [["192.0.2.1", 2], "x"]]')
def test_any_text_is_an_answer_or_refused(text):
    with contextlib.suppress(Invalid):
        probe.read_facts(text, TASK)
    told = probe._read_pairs(text.encode(errors="replace"), {"192.0.2.1"})
    assert isinstance(told, str) or all(pair[0][0] == "192.0.2.1" for pair in told)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('[[["192.0.2.1", 1], "no route"]]', [[["192.0.2.1", 1], "no route"]]),
        ('[[["192.0.2.7", 1], "no route"]]', "its answer[0][0][0] is not what it should be"),
        ('[[["192.0.2.1", 0], "no route"]]', "its answer[0][0][1] is not what it should be"),
        ('[[["192.0.2.1", 1], "x"], [["192.0.2.1", 2], "x"]]', "one machine twice"),
        (NESTED, "its answer[0] is not what it should be"),
        ("[" * 100_000, "it is no JSON"),
    ],
)
def test_what_a_machine_says_of_its_peers(said, told):
    told = told if isinstance(told, list) else f"what it says is impossible ({told})"
    assert probe._read_pairs(said.encode(), {"192.0.2.1": "node1"}) == told


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


@many
@given(st.lists(st.binary(max_size=40) | escapes.map(lambda t: t.encode(errors="replace"))))
def test_any_output_of_a_rank_is_shown_clean(tmp_path_factory, pieces):
    folder = tmp_path_factory.mktemp("run")
    with (folder / "screen").open("w+", encoding="utf-8") as screen:
        terminal = Terminal(screen)
        terminal.keep_in(folder / "controller.log")
        logs = RunLogs(folder, terminal, 4)
        for piece in pieces:
            logs.feed("node1", 2, "stdout", piece)
        logs.close()
        assert terminal.drain()
    for name in ("screen", "controller.log", "nodes/node1/rank2.log"):
        if (folder / name).exists():
            assert not TERMINAL.search((folder / name).read_text().replace("\r\x1b[K", ""))


@many
@given(st.binary(max_size=200))
def test_no_line_of_known_hosts_hides_a_confirmed_key(data):
    found = ssh.read_known_hosts(data + b"\n" + KNOWN + b"\n" + data)
    (line,) = [line for line in found if line.means("192.0.2.7") and not line.revoked]
    assert line.entry.to_line().encode().split() == KNOWN.split()


@many
@given(st.lists(st.binary(max_size=60) | values.map(lambda v: json.dumps(v).encode()), max_size=5))
def test_any_timings_are_read(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("run") / "rank0.steps.jsonl"
    good = b'{"kind": "start", "attempt": 1, "resumed_samples": 8}'
    odd = b'{"kind": "start", "x": %s}' % NESTED.encode()
    path.write_bytes(b"\n".join([*lines, b'["start"]', odd, good]) + b"\n")
    assert [line["resumed_samples"] for line in attempts.lines_of(path, attempts.START)][-1:] == [8]


@many
@given(st.lists(st.text(max_size=30), max_size=5))
def test_any_names_of_checkpoints_are_read(names):
    tip = collect.newest(names)
    assert tip is None or re.fullmatch(r"step-[0-9]+\.pt", tip[1])


@many
@given(values)
def test_any_value_has_a_shape_or_not(value):
    for shape in probe.shape(TASK).values():
        with contextlib.suppress(Invalid):
            validate.check(value, shape, "value")


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
    "row": (validate.Row((str, int)), ["a", 1]),
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
    assert found.keys() == shape.keys() and validate.check(found, shape, "it") == found
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
    frames = Frames(RANKS, "r")
    data = b"".join(sent)
    with contextlib.suppress(Invalid):
        for start in range(0, len(data), size):
            for frame, _ in frames.feed(data[start : start + size]):
                assert frame["type"] == "hello" or sent.index(wire(HELLO)) >= 0
    assert isinstance(frames.rest(), str)


@many
@given(
    st.lists(st.sampled_from([b"word ", b"\n", b"\r", b"x" * 5000, b"x" * 300_000, b"\xff"])),
    st.integers(1, 1 << 20),
)
def test_lines_of_any_length_are_cut_and_kept(tmp_path_factory, pieces, limit):
    folder = tmp_path_factory.mktemp("run")
    with (folder / "screen").open("w+", encoding="utf-8") as screen:
        logs = RunLogs(folder, Terminal(screen), 4, limit)
        for piece in pieces:
            logs.feed("node1", 2, "stdout", piece)
        logs.close()
    path = folder / "nodes/node1/rank2.log"
    assert not path.exists() or path.stat().st_size < limit + 4096


@many
@given(
    st.dictionaries(st.sampled_from(["node1", "node2"]), st.lists(st.integers(0, 9), max_size=3))
)
def test_only_names_of_the_host_and_its_ranks_are_asked_for(ranks):
    told = [{"attempt": 1, "ranks": ranks}]
    names = {one.name for one in collect.wanted("node1", told, Sizes())}
    mine = {int(n) for name in names for n in re.findall(r"rank(\d+)", name)}
    assert mine == set(ranks.get("node1", []))
    assert all(name.startswith(("nodes/node1/", "samples/")) for name in names)
