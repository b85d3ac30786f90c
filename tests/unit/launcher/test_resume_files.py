"""What RESUME reads of a run: its plan.json and attempts.json, damaged or somebody else's."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract import seal
from contract.errors import UserError
from launcher import folders, run
from launcher.plan.checks import check_machines
from launcher.watch.attempts import Attempts
from tests import fuzz
from tests.unit.launcher.launcher_values import planned

# What a resumed run is begun from, of all that its plan has.
PLAN = json.loads(
    json.dumps(
        planned(
            **{"sync": "ef:15", "nodes": 2, "model": "resnet18", "port": 29500, "epochs": 1},
            **{"batch": 32, "keep": 4, "args": ["--lr", "0.1"]},
        )
    )
)
ATTEMPTS = {
    "status": "running",
    "attempts": [
        {
            **{"attempt": 1, "nodes": ["node1"], "ranks": {"node1": [0, 1]}, "world_size": 2},
            **{"code_sha256": "a", "master_port": 29500, "started_unix": 1.5},
            **{"wall_seconds": None, "reason": "first attempt", "status": "running"},
            **{"resumed_samples": 0, "first_cause": {"message": "it fell"}},
        }
    ],
}
STOPPED = {
    "status": "stopped",
    "attempts": [{**ATTEMPTS["attempts"][0], "status": "stopped", "wall_seconds": 9.5}],
}
PLAN["options"]["sync"] = "auto"
FILES = {"plan.json": PLAN, "attempts.json": ATTEMPTS}
ODD = ("auto", "stopped", "--config=/dev/null", ["--sync", "auto"], "nonsense", 65536)


class Asked(Exception):
    """As far as the machines."""


def asked(options, *_):
    raise Asked(options)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """resumed({file: text}): whether machines would be asked; the options then, or the sentence."""
    runs = tmp_path_factory.mktemp("runs")
    folder = runs / "20261101T000000Z-resnet18-2n"
    folder.mkdir()

    def resumed(files, **given):
        for name, text in files.items():
            (folder / name).write_bytes(text)
        try:
            run.resume(folder.name, given)
        except Asked as found:
            kept = Attempts(folder)
            json.dumps([kept.close_broken(), sorted(kept.used_ports)])
            return found.args[0]
        except UserError as error:
            assert str(error).isprintable() and len(str(error)) < 2000
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "RUNS", runs)
        patch.setattr(run, "check_machines", asked)
        yield resumed


def written(files):
    return {name: json.dumps(document).encode() for name, document in files.items()}


def test_a_run_goes_on_with_the_options_of_its_plan(resumed):
    """It began before there was a variable BATCH."""
    older = {name: value for name, value in PLAN["options"].items() if name != "batch"}
    options = resumed(written({**FILES, "plan.json": {**PLAN, "options": older}}))
    assert options.trainer == {"model": "resnet18", "sync": "auto", "epochs": 1, "lr": 0.1}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("plan.json", {"options": True}, "plan.json is damaged (its options: "),
        ("plan.json", {"options": {**PLAN["options"], "sync": "\x1b]0;x\x07"}}, "options.sync: "),
        ("attempts.json", {"attempts": {}}, "attempts.json is damaged (its attempts: "),
        ("attempts.json", {"attempts": [{"attempt": 1}]}, "attempts[0]: "),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_named(resumed, name, change, says):
    said = resumed(written({**FILES, name: {**FILES[name], **change}}))
    assert isinstance(said, str) and says in said and "start a new one" in said


def test_no_file_is_sent_that_another_s_run_names(resumed):
    words = {"args": ["--weights", "/root/secret"]}
    foreign = {**PLAN, **planned(**words), "seal": "0" * 64}
    assert "WEIGHTS=/root/secret" in resumed(written({**FILES, "plan.json": foreign}))
    assert not isinstance(resumed(written({**FILES, "plan.json": foreign}), **words), str)


@pytest.mark.parametrize(
    "words",
    [
        {"inventory": "RUN/machines"},
        {"model": "RUN/net.py:net"},
        {"args": ["--config", "RUN/recipe.yaml"]},  # which names a model
        {"script": "RUN/machines", "folder": "RUN", "resume_args": "--again"},
        {"requirements": "RUN/r.txt", "script": "-m a", "folder": "RUN", "resume_args": "--again"},
    ],
    ids=lambda words: next(iter(words)),
)
def test_what_another_s_run_would_have_executed_is_asked_for_by_name(
    resumed, tmp_path, monkeypatch, words
):
    """No seal holds: the folder came from elsewhere, or was changed."""
    program, made = tmp_path / "machines", tmp_path / "made"
    program.write_text(f"#!/bin/sh\ntouch {made}\necho '{{}}'\n")
    program.chmod(0o755)
    (tmp_path / "recipe.yaml").write_text(f"model: {tmp_path}/net.py:net\n")
    words = json.loads(json.dumps(words).replace("RUN", str(tmp_path)))
    foreign = {**PLAN, **planned(**words), "seal": "0" * 64}
    if "inventory" in words:
        monkeypatch.setattr(run, "check_machines", check_machines)
    said = resumed(written({**FILES, "plan.json": foreign}))
    assert isinstance(said, str) and "type it with RESUME" in said and not made.exists()
    foreign["seal"] = seal.seal(foreign["options"])
    monkeypatch.setattr(run, "check_machines", asked)
    assert not isinstance(resumed(written({**FILES, "plan.json": foreign})), str)
    foreign["options"]["keep"] = 9  # as nobody typed it
    assert "type it with RESUME" in resumed(written({**FILES, "plan.json": foreign}))
    model = {"model": f"{tmp_path}/net.py:net"} if "args" in words else {}
    typed = {key: word for key, word in {**words, **model}.items() if key != "args"}
    assert not isinstance(resumed(written({**FILES, "plan.json": foreign}), **typed), str)
    if typed.pop("folder", None):  # which is sent to every machine
        assert "FOLDER=" in resumed(written({**FILES, "plan.json": foreign}), **typed)


def test_a_link_that_leads_out_of_a_run_s_folder_is_named(resumed, tmp_path):
    """Through it RESUME would write what a script's ranks send."""
    link = folders.RUNS / "20261101T000000Z-resnet18-2n/work"
    link.symlink_to(tmp_path)
    assert "outside the run's folder" in resumed(written(FILES))
    link.unlink()
    link.symlink_to("plan.json")
    assert not isinstance(resumed(written(FILES)), str)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", FILES)
def test_an_odd_file_of_a_run_is_refused_or_goes_on(resumed, name):
    ends = {str: 0, folders: 0}

    @fuzz.many(160)
    @example(STOPPED if name == "attempts.json" else PLAN)
    @given(fuzz.odd(FILES[name], ODD))
    def each_odd(document):
        told = resumed(written({**FILES, name: document}))
        ends[str if isinstance(told, str) else folders] += 1

    @fuzz.many(40)
    @given(fuzz.damaged(json.dumps(FILES[name]).encode()) | st.just(b"[" * 200_000))
    def each_damaged(content):
        resumed({**written(FILES), name: content})

    each_odd()
    each_damaged()
    assert min(ends.values()) > 3, ends
