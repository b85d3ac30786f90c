"""What a node says, where it comes in (boundary/): 100 and more generated cases for each parser,
none of which may do anything but be taken as true or be refused."""

import base64
import contextlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs, to_builtins

from boundary import run_files, schema
from boundary.answers import MOST_PACKAGES, Unreached
from boundary.frames import KINDS, LARGEST, Frames
from boundary.schema import Invalid
from contract.errors import UserError
from contract.records import PIECE
from contract.text import clean
from launcher import judge, look, measure
from launcher.look import ControlFacts, OpenMachines
from launcher.machines import ssh
from launcher.terminal import Terminal
from launcher.watch import attempts
from launcher.watch.lines import RunLogs
from tests import fuzz
from tests.unit.launcher.launcher_values import ANSWER as TOLD
from tests.unit.launcher.launcher_values import build, card, facts, gpus, host, needs

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


KIND = {kind.__struct_config__.tag: kind for kind in KINDS}
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
        ('{"type": "beat", "unix": 1e999, "running": [], "disk_free": 1}', "unix"),
        ('{"type": "beat", "unix": 1.0, "running": [7]}', "rank"),
        (f'{{"type": "beat", "unix": {NESTED}, "running": [], "disk_free": 1}}', "unix"),
        ('{"type": "owner", "sign": "a word of its own"}', "sign"),
        ('{"type": ["log"]}', None),
        ('{"type": "log", "rank": 7, "stream": "stdout", "bytes": 3}', "rank"),
        ('{"type": "log", "rank": 2, "stream": "stdout", "bytes": -3}', "bytes"),
        ('{"type": "log", "rank": 2, "stream": "stdin", "bytes": 3}', "stream"),
        ('{"type": "trouble", "what": "x", "message": {"a": 1}}', "message"),
        (json.dumps({**GOOD[5], "offset": None}), "offset"),
        (json.dumps({**GOOD[5], "bytes": PIECE + 1}), "bytes"),
        (json.dumps({**GOOD[6], "rank": 7}), "rank"),
        (json.dumps({**WHOLE_EXIT, "left": ["x"]}), "left"),
        (json.dumps({**WHOLE_EXIT, "reason": "because"}), "reason"),
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


def test_before_a_guard_has_said_hello_all_is_text():
    frames = Frames(RANKS)
    assert list(frames.feed(wire(GOOD[0]) + b'{"x\n')) == []
    assert frames.unframed_text().endswith('{"x')


@pytest.mark.parametrize("size", [1, 7])
def test_frames_do_not_depend_on_the_pieces(size):
    payload, frames, found = b'{"a": 1}\nxy\n', Frames(RANKS), []
    log = json.dumps({**GOOD[2], "bytes": len(payload)}).encode() + b"\n" + payload
    data = b"welcome to node1\n" + wire(HELLO) + log + wire(GOOD[4])
    for start in range(0, len(data), size):
        found += frames.feed(data[start : start + size])
    kinds = ["hello", "log", "beat"]
    assert [(frame.type, rest) for frame, rest in found] == list(zip(kinds, (b"", payload, b"")))
    assert frames.unframed_text() == "welcome to node1"


def test_what_no_shape_has_is_left_out_and_every_text_can_be_written():
    more = '{"type": "trouble", "what": "disk", "message": "full \\ud800", "x": HERE}\n'
    (_, (frame, _)) = read(wire(HELLO) + more.replace("HERE", NESTED).encode())
    assert to_builtins(frame) == {"type": "trouble", "what": "disk", "message": "full \ufffd"}


@pytest.mark.parametrize("again", [frame for frame in (HELLO, *GOOD) if KIND[frame["type"]].once])
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
        with pytest.raises(Invalid, match=re.escape(asked)):
            look.read_facts(json.dumps({**ANSWER, name: less}), TASK)


def test_a_machine_has_as_many_packages_as_a_machine_may_have():
    """Of each a file is made for pip: 100,000 names were 390 MiB."""
    most = {f"a{number}": "1" for number in range(MOST_PACKAGES)}
    whole = json.dumps({**ANSWER, "distributions": most})
    assert len(look.read_facts(whole, TASK).distributions) == MOST_PACKAGES
    with pytest.raises(Invalid, match=r"answer.distributions: "):
        look.read_facts(json.dumps({**ANSWER, "distributions": {**most, "b": "1"}}), TASK)
    with pytest.raises(Invalid, match="4096"):
        look.read_facts(json.dumps({**ANSWER, "distributions": {"k" * 5000: "1"}}), TASK)


@pytest.mark.parametrize("name", ["home", "cores", "gpus", "missing"])
def test_what_is_nested_without_end_is_no_answer(name):
    whole = json.dumps({**ANSWER, name: "HERE"})
    for what in (NESTED, "[" * 100_000, "1" * 1_000_000):
        with pytest.raises(Invalid):
            look.read_facts(whole.replace('"HERE"', what), TASK)
    with pytest.raises(Invalid, match="answer: "):
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
    "runs": [{"pid": 7, "run": "r", "holder": "ann@desk", "seconds": 9}],
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
    known = {"node1": structs.replace(found, host="node1"), "node2": facts(2)}
    env = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    hosts = [host(1, env=env, cuda_home="/usr/local/cuda"), host(2)]
    chosen = {"device": device, "output": "."}
    asked = needs(**chosen)
    with contextlib.suppress(UserError):
        for some in (hosts[:1], hosts):
            judge.find_problems(OpenMachines(some, {}, known), asked, ControlFacts(1 << 40))
        measure.make_timetables(hosts, known)
        json.dumps(build(hosts, [*known.values()], settings=chosen).document())


@fuzz.many(300)
@given(st.sampled_from(GOOD).flatmap(lambda good: fuzz.odd(good, ODD)))
def test_an_odd_frame_is_true_or_refused(frame):
    text = wire(HELLO) + json.dumps(frame).encode() + b"\nabc"
    with contextlib.suppress(Invalid):
        for taken, payload in read(text):
            json.dumps(to_builtins(taken)).encode()
            assert getattr(taken, "rank", None) in (*RANKS, None) and len(payload) <= LARGEST


@many
@given(st.text() | st.sampled_from(fuzz.PLAIN).map(json.dumps))
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
        ([way("192.0.2.7")], "it lists a machine twice, or a machine that was not requested"),
        ([way(port=0)], "its answer[0].port: "),
        ([way(), way(port=2)], "it lists a machine twice, or a machine that was not requested"),
        (NESTED, "its answer[0]: "),
        ("[" * 100_000, "its answer[0]: "),
    ],
)
def test_what_a_machine_says_of_its_peers(said, told):
    line = said if isinstance(said, str) else json.dumps(said)
    found = look.read_unreached(line.encode(), {"192.0.2.1": "node1"})
    if told is None:
        assert found == [Unreached(**one) for one in said]
    else:
        assert found.startswith(f"its answer is malformed ({told}")


# A public key: 32 bytes of which none is secret.
KEY = base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + bytes(range(32)))
KNOWN = b"192.0.2.7 ssh-ed25519 " + KEY
TERMINAL = re.compile("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\ud800-\udfff]")
escapes = st.lists(
    st.sampled_from(["\x1b", "[", "]", "0;t", "\x07", "\x1b\\", "31m", "\x9b", "\r", "c", "é", "P"])
    | st.characters(),
    max_size=20,
).map("".join)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]52;c;cm0gLXJm\x1b\\clipboard", "clipboard"),
        ("\x1b[2J\x1b[Hscreen", "screen"),
        ("\x1bPq sixel\x1b\\after", "after"),
        ("\x9b31mc1", "c1"),
        ("a\u202eb", "ab"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
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
        terminal.open_log(folder / "controller.log")
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
@example(b"|1|a|b ssh-ed25519 " + KEY)
@example(b"node1 ssh-ed25519 " + KEY[:9])
@given(st.binary(max_size=200))
def test_no_line_of_known_hosts_hides_a_confirmed_key(data):
    found = ssh.read_known_hosts(data + b"\n" + KNOWN + b"\n" + data)
    (line,) = [line for line in found if line.matches("192.0.2.7") and not line.is_revoked]
    assert line.entry.to_line().encode().split() == KNOWN.split()


def as_json(value):
    return json.dumps(value).encode()


@many
@given(st.lists(st.binary(max_size=60) | st.sampled_from(fuzz.PLAIN).map(as_json), max_size=5))
def test_any_timings_are_read(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("run") / "rank0.1.steps.jsonl"
    good = b'{"kind": "start", "attempt": 1, "resumed_samples": 8}'
    odd = b'{"kind": "start", "x": %s}' % NESTED.encode()
    path.write_bytes(b"\n".join([*lines, b'["start"]', odd, good]) + b"\n")
    assert [line.resumed_samples for line in attempts.read_record_lines(path, run_files.Start)][
        -1:
    ] == [8]


def test_threads_learn_a_type_one_after_the_other(monkeypatch):
    """msgspec 0.22 ends the process by SIGSEGV where one finds what another has half learned: seven
    of 25 processes of 16 threads did."""
    at_once, most = [], []

    def learn(kind):
        at_once.append(kind)
        most.append(len(at_once))
        time.sleep(0.01)
        at_once.pop()
        return SimpleNamespace(decode=lambda data: None)

    monkeypatch.setattr(schema.msgspec.json, "Decoder", learn)
    schema.make_decoder.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        kinds = [int, str, dict[str, int], list[int]]
        list(pool.map(lambda kind: schema.decode("1", kind, "one"), kinds))
    schema.make_decoder.cache_clear()
    assert most == [1, 1, 1, 1]
