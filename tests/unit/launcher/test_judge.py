"""What is wrong with machines: each problem names the machine, the cause and the remedy."""

from dataclasses import replace
from itertools import product

import pytest

from boundary.answers import Listing
from boundary.schema import convert
from contract.errors import UserError
from contract.machines import CLOCK_TOLERANCE
from contract.options import Config
from launcher.look import (
    ControlFacts,
    DataSource,
    OpenMachines,
    clock_skew,
    read_data_sources,
)
from launcher.machines import inventory
from launcher.problems import ALWAYS, NEVER, Refused, problem, refuse_or_warn
from tests.unit.launcher import launcher_values
from tests.unit.launcher.launcher_values import (
    DATA,
    LISTING,
    codes,
    facts,
    gpus,
    host,
    needs,
)


def problems(*found, model="resnet18", run=None):
    hosts = [host(int(one.host[4:])) for one in found]
    asked = replace(needs(model=model), run=run)
    return launcher_values.problems(hosts, found, asked)


@pytest.mark.parametrize(("off", "wrong"), [(-0.5, False), (1.5, True)])
def test_a_clock_is_wrong_for_a_run_where_it_is_wrong_for_make_check(off, wrong):
    """For make check: tests/unit/ansible/test_provision_preflight.py."""
    ahead = clock_skew(100.1 + CLOCK_TOLERANCE + off, 100.0, 100.1)
    behind = clock_skew(100.0 - CLOCK_TOLERANCE - off, 100.0, 100.1)
    found = problems(facts(1, skew=behind), facts(2, skew=ahead))
    assert codes(found) == ["clock"] * 2 * wrong


def splits(images, classes=10, **more):
    listing = {**LISTING, "images": images, "classes": classes, **more}
    return {"train": listing, "val": LISTING}


@pytest.mark.parametrize(
    ("own", "code"),
    [
        (splits(1442), None),
        (splits(1441), "lacks"),
        (splits(1500, classes=9), "lacks"),
        (splits(1442, sha256="cd" * 32), "differs"),
    ],
)
@pytest.mark.parametrize("is_copied", [True, False])
def test_less_than_its_source_has_is_refused_and_other_is_said(own, code, is_copied):
    found = [facts(number, data={**DATA, "splits": own}) for number in (1, 2)]
    whole = convert(splits(1442), dict[str, Listing], "listing")
    sources = dict.fromkeys(["node1", "node2"], DataSource("/d here", is_copied, whole))
    hosts = [host(1), host(2)]
    found = launcher_values.problems(hosts, found, control=ControlFacts(1 << 40, sources=sources))
    kind = "copy" if is_copied else "share"
    assert codes(found) == ([f"{kind}-{code}"] if code else [])
    assert [one.blocks for one in found] == ([ALWAYS if code == "lacks" else NEVER] if code else [])
    assert all(len(one.labels) == 2 for one in found)


def test_a_folder_of_any_files_may_differ_but_not_lack_what_its_source_has():
    whole = {**LISTING, "classes": 0, "images": 20_000, "bytes": 10**9}
    for changed, wrong in (
        ({}, []),
        ({"sha256": "cd" * 32}, ["copy-differs", "files-differ"]),
        ({"images": 19_999}, ["copy-lacks", "files-differ"]),
        ({"bytes": 10**9 - 1}, ["copy-lacks", "files-differ"]),
    ):
        own = [{**DATA, "splits": {"files": one}} for one in (whole, {**whole, **changed})]
        found = [facts(number, data=data) for number, data in enumerate(own, 1)]
        source = DataSource(
            "/d here", True, convert({"files": whole}, dict[str, Listing], "listing")
        )
        control = ControlFacts(1 << 40, sources={"node2": source})
        said = launcher_values.problems([host(1), host(2)], found, control=control)
        assert sorted(codes(said)) == wrong
        if "copy-lacks" in wrong:
            lack = next(one for one in said if one.code == "copy-lacks")
            assert f"{own[1]['splits']['files']['images']} files" in lack.message.replace(",", "")
            assert "20000 files" in lack.message.replace(",", "")


def test_the_source_of_a_copy_is_the_folder_here_and_only_of_what_is_copied(tmp_path, monkeypatch):
    for split, name in product(("train", "val"), ("ant", "cat")):
        (tmp_path / "set" / split / name).mkdir(parents=True)
        (tmp_path / "set" / split / name / "0.jpg").touch()
    monkeypatch.setattr(inventory, "CHECKOUT", tmp_path / "checkout")
    copied = {"set": f"{tmp_path}/set", "gone": f"{tmp_path}/gone"}
    hosts = [host(1, copied=copied), host(2)]

    def sources(data):
        return read_data_sources(OpenMachines(hosts, {}, {}), needs(Config(data=data)))

    for data in ("set", "/srv/tandem/data/set"):
        assert {name: one.splits["train"].images for name, one in sources(data).items()} == {
            "node1": 2
        }
    for data in ("gone", "other", "/set", ""):
        assert sources(data) == {}


def test_the_source_of_a_share_is_its_server_if_that_takes_no_part(tmp_path):
    for split, name in product(("train", "val"), ("ant", "cat")):
        (tmp_path / "set" / split / name).mkdir(parents=True)
        (tmp_path / "set" / split / name / "0.jpg").touch()
    machines = tmp_path / "pcs.ini"
    local = f"ansible_connection=local data_root={tmp_path} node_dir={tmp_path / 'node'}"
    shared = "share_protocol=nfs share_host=pc1"
    machines.write_text(f"[cluster]\npc1 {local} {shared}\npc2 {local} {shared}\n")
    hosts = inventory.load(machines)
    options = Config(inventory=str(machines), data="set")

    def sources(hosts):
        return read_data_sources(OpenMachines(hosts, {}, {}), needs(options))

    assert {name: (one.name, one.is_copied) for name, one in sources(hosts[1:]).items()} == {
        "pc2": ("pc1", False)
    }
    assert sources(hosts[1:])["pc2"].splits["val"].classes == 2
    assert sources(hosts) == {}


def test_what_several_machines_have_in_common_is_said_once():
    missing = {"data": {**DATA, "exists": False, "others": ["digits", "mnt"]}}
    (one,) = problems(facts(1, **missing), facts(2, **missing))
    assert (one.code, one.labels) == ("data-missing", ("node1 (192.0.2.1)", "node2 (192.0.2.2)"))
    both = problems(facts(1, **missing), facts(2, **missing, writable=False))
    assert [one.labels for one in both[1:]] == [("node2 (192.0.2.2)",)]


def test_a_run_that_goes_on_does_not_stand_in_its_own_way():
    left = facts(1, runs=[{"pid": 7, "run": "r", "holder": "ann@desk", "seconds": 9}], gpus=gpus(1))
    assert problems(left, run="r") == []
    assert codes(problems(left, run="other")) == ["machine-busy"]


def test_force_passes_over_what_does_not_always_block():
    soft, hard = problem("drivers-differ", values="2"), problem("precision", reason="no half")
    assert refuse_or_warn([soft], force=True) == [soft.text]
    for wrong, force in (([soft], False), ([soft, hard], True)):
        with pytest.raises(Refused) as caught:
            refuse_or_warn(wrong, force)
        assert ("(FORCE=1 starts anyway.)" in caught.value.problems) == (hard not in wrong)
        assert caught.value.reasons == [hard if force else soft]


def test_more_nodes_than_the_inventory_lists():
    hosts = [host(1), host(2)]
    with pytest.raises(UserError, match=r"NODES=3, but inventory.ini lists 2 \(node1, node2\)"):
        inventory.select(hosts, Config(nodes=3))
    assert inventory.select(hosts, Config(nodes=1)) == hosts[:1]
