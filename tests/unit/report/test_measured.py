"""A prediction from what `make plan` measured without a run."""

import json
import time

import pytest

from report.__main__ import main
from report.measurements import read_basis
from tests.unit.report.report_runs import RunBuilder

NAME = "20261122T120000Z-resnet50-3n"


class Measured(RunBuilder):
    """Each machine is a world of its own."""

    def __init__(self, folder, data="", made=None, links=True, **settings):
        super().__init__(folder, nodes=3, epochs=1, **settings)
        self.data, self.made, self.measures_links = data, made or time.time(), links

    def start_line(self, rank, host):
        alone = {"world_size": 1, "global_batch": self.batch, "rank": 0, "node_rank": 0}
        return {**super().start_line(rank, host), **alone}

    def plan_nodes(self):
        return [{**node, "ranks": [0]} for node in super().plan_nodes()]

    def write(self):
        super().write()
        path = self.folder / "plan.json"
        told = {**json.loads(path.read_text()), "data": self.data}
        path.write_text(json.dumps({**told, "created_unix": self.made}))
        for index, host in enumerate(self.hosts if self.measures_links else ()):
            (self.folder / f"nodes/{host}/rank{index}.steps.jsonl").rename(
                self.folder / f"nodes/{host}/rank0.steps.jsonl.new"
            )
            after = self.hosts[(index + 1) % 3]
            rates = {"mbit_to": 900.0 - index, "mbit_from": 940.0}
            told = {"host": host, "pairs": {after: rates}, "ring": {"mbit": 700.0 + index}}
            (self.folder / f"nodes/{host}/links.json").write_text(json.dumps(told))
        for path in self.folder.glob("nodes/*/*.new"):
            path.rename(path.with_suffix(""))
        return self.folder


def plan(tmp_path, capsys, *words):
    argv = ["plan", "--runs", str(tmp_path), "--model", "resnet50", "--nodes", "3", *words]
    code = main(argv)
    told = capsys.readouterr()
    return code, told.out + told.err


HERE = ("--machines", "node1,node2,node3")


def test_the_machines_in_parts_by_speed_and_the_links_as_measured(tmp_path, capsys):
    # node2 needs half as much again for backward; parts by speed make most of that good.
    slow = {1: {"backward": 0.12}}
    folder = Measured(tmp_path / "measured" / NAME, by_rank=slow).write()
    basis = read_basis(folder)
    assert [round(step.work, 3) for step in basis.steps] == [0.128, 0.146, 0.14]
    assert basis.own_speeds == pytest.approx({"node1": 250, "node2": 190.5, "node3": 250}, abs=0.1)
    # Of two the slower way of their link; of three what came while all sent.
    assert [rate * 8 / 1e6 for rate in basis.rates] == pytest.approx([900.0, 900.0, 700.0])
    code, out = plan(tmp_path, capsys, *HERE)
    assert code == 0
    told = " ".join(out.split())
    assert "on node1, node2, node3 by themselves, on noise in the place of images" in told
    assert "a step took 0.13 s (node1) to 0.17 s (node2)" in told
    assert (
        "(BALANCE=auto) the images of a step are node1 35, node2 26, node3 35: a step of all takes "
        "0.14 s without the network, and with equal parts 0.17 s" in told
    )
    assert (
        "Of it on node2: forward 40 ms, backward 0.12 s, optimizer 4 ms. 25.6 M parameters, 102 MB"
        in told
    )
    assert "Links: 899 Mbit/s of payload in pairs, 700 while all sent" in told
    assert "90 epochs" not in told.split("Counted over")[0]  # of noise
    assert max(map(len, out.splitlines())) <= 80
    rows = {tuple(line.split()[:2]): line.split() for line in out.splitlines()}
    assert float(rows["1", "="][6]) == pytest.approx(32 / 0.128, rel=0.01)
    kept = json.loads((tmp_path / "plan-resnet50-3n.json").read_text())
    assert kept["own_speeds"]["node2"] == pytest.approx(190.5, abs=0.1)


def test_of_machines_that_are_nearly_alike_the_slowest_counts(tmp_path, capsys):
    Measured(tmp_path / "measured" / NAME, by_rank={1: {"backward": 0.09}}).write()
    basis = read_basis(tmp_path / "measured" / NAME)
    assert [round(step.work, 3) for step in basis.steps] == [0.128, 0.138, 0.138]
    assert "BALANCE" not in plan(tmp_path, capsys, *HERE)[1]


def test_images_of_ones_own_give_the_time_of_epochs(tmp_path, capsys):
    Measured(tmp_path / "measured" / NAME, data="imagenet").write()
    _, out = plan(tmp_path, capsys, *HERE)
    assert "90 epochs" in out and "noise" not in out


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("--machines", "node1,node2,node4"), {}),
        ((), {}),
        ((*HERE, "--batch", "64"), {}),
        ((*HERE, "--precision", "O1"), {}),
        ((*HERE, "--image-size", "32"), {}),
        (HERE, {"made": time.time() - 8 * 86400}),
    ],
)
def test_what_was_measured_of_something_else_is_not_taken(tmp_path, capsys, words, settings):
    Measured(tmp_path / "measured" / NAME, **settings).write()
    code, out = plan(tmp_path, capsys, *words)
    assert code == 3
    assert "Nothing of resnet50" in out and "`make plan NODES=3 MODEL=resnet50" in out
    assert not list(tmp_path.glob("plan-*"))


def test_what_was_measured_serves_fewer_machines_and_any_precision(tmp_path, capsys):
    Measured(tmp_path / "measured" / NAME).write()
    words = ("--nodes", "2", "--machines", "node1,node2,node9", "--precision", "auto")
    assert plan(tmp_path, capsys, *words, "--batch", "32")[0] == 0


def test_the_newest_of_runs_and_measurements_is_taken(tmp_path, capsys):
    Measured(tmp_path / "measured" / NAME).write()
    RunBuilder(tmp_path / "20261122T110000Z-resnet50-4n").write()
    assert "Measured at" in plan(tmp_path, capsys, *HERE)[1]
    RunBuilder(tmp_path / "20261122T130000Z-resnet50-4n").write()
    assert "20261122T130000Z" in plan(tmp_path, capsys, *HERE)[1]


@pytest.mark.parametrize("broken", ["ring", "attempts", "rank"])
def test_half_a_measurement_predicts_nothing_that_it_did_not_measure(tmp_path, capsys, broken):
    folder = Measured(tmp_path / "measured" / NAME).write()
    if broken == "ring":
        (folder / "nodes/node2/links.json").write_text('{"pairs": 3, "ring": {"mbit": "fast"}}')
        assert read_basis(folder).rates == ()
        (folder / "nodes/node2/links.json").write_text('{"pairs": {"node3": 3}, "ring": []}')
        assert read_basis(folder).rates == ()
        return
    if broken == "attempts":
        (folder / "attempts.json").write_text(json.dumps({"status": "failed", "attempts": []}))
    else:
        (folder / "nodes/node3/rank0.steps.jsonl").write_text("")
    assert plan(tmp_path, capsys, *HERE)[0] == 3
