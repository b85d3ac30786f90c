"""A prediction from what `make plan` measured without a run."""

import json
import time

import pytest

from contract import runs
from report.__main__ import main
from report.measurements import newest_speeds, read_basis
from tests.unit.report.report_runs import RunBuilder, change

NAME, NEWER = "20261122T120000Z-resnet50-3n", "20261122T130000Z-resnet50-4n"


class Measured(RunBuilder):
    """Each machine is a world of its own; `mbit` of those pairs that differ, as "12"."""

    def __init__(self, folder, data="", made=None, mbit=None, mtu=1500, **settings):
        super().__init__(folder, **{"nodes": 3, "epochs": 1, **settings})
        self.data, self.made = data, made or time.time()
        self.mbit, self.mtu, self.speed, self.ring = mbit or {}, mtu, 1000, 700.0

    def start_line(self, rank, host):
        alone = {"world_size": 1, "global_batch": self.batch, "rank": 0, "node_rank": 0}
        return {**super().start_line(rank, host), **alone}

    def plan_nodes(self):
        return [{**node, "ranks": [0]} for node in super().plan_nodes()]

    def write(self):
        super().write()
        change(self.folder / "plan.json", data=self.data, created_unix=self.made)
        for index, host in enumerate(self.hosts):
            path = self.folder / f"nodes/{host}/rank{index}.1.steps.jsonl"
            path.rename(path.with_name("rank0.1.steps.jsonl"))
            pairs = {
                peer: {"mbit_to": self.mbit.get(host[-1] + peer[-1], 899.0), "mbit_from": 940.0,
                       "latency_ms": 0.1, "latency_p99_ms": 0.2, "mtu": self.mtu}
                for peer in self.hosts[index + 1 :]
            }  # fmt: skip
            card = {"interface": "eth0", "mtu": 1500, "speed": self.speed}
            links = {"pairs": pairs, "ring": {"mbit": self.ring + index}, "card": card}
            self.dump(f"nodes/{host}/links.json", links)
        return self.folder


def plan(tmp_path, capsys, *words):
    code = main(["plan", "--runs", str(tmp_path), "--model", "resnet50", "--nodes", "3", *words])
    return code, capsys.readouterr()


def kept(tmp_path):
    """What a plan of three machines wrote for the runs after it."""
    return json.loads((tmp_path / "plan-resnet50-3n.json").read_text())


HERE = ("--machines", "node1,node2,node3")


def test_the_machines_in_parts_by_speed_and_the_links_as_measured(tmp_path, capsys):
    # node2 needs half as much again for backward; parts by speed make most of that good.
    slow = {1: {"backward": 0.12}}
    mbit = {"12": 900.0, "13": 899.0}
    folder = Measured(tmp_path / "measured" / NAME, by_rank=slow, mbit=mbit).write()
    basis = read_basis(folder)
    assert [round(step.work, 3) for step in basis.steps] == [0.128, 0.146, 0.14]
    assert basis.machine_speeds == pytest.approx(
        {"node1": 250, "node2": 190.5, "node3": 250}, abs=0.1
    )
    # Of two the slower way of their link; of three what came while all sent.
    assert [rate * 8 / 1e6 for rate in basis.rates] == pytest.approx([900.0, 900.0, 700.0])
    code, (out, _) = plan(tmp_path, capsys, *HERE)
    said = " ".join(out.split())
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    parts = "in proportion to its speed, node1 35, node2 26, node3 35. A step then takes 0.14 s"
    assert f"{parts} without the network, and 0.17 s with equal batches" in said
    assert (
        "a step took 0.13 s (node1) to 0.17 s (node2). The largest parts on node2: forward 40 ms"
        in said
    )
    assert "Links: the slowest link reaches 899 Mbit/s, and 700 Mbit/s while all" in said
    assert "noise instead of images" in said
    assert "90 epochs" not in said.split("The speeds are for")[0]  # of noise
    assert "pair " not in out
    lines = plan(tmp_path, capsys, *HERE, "--all")[1].out.splitlines()
    assert lines[1].split() == ["node1", "-", "node2", "900", "940", "0.10", "0.20", "1500"]
    alone = kept(tmp_path)["rows"][0]
    assert alone["images_per_second"] == pytest.approx(32 / 0.128, rel=0.01)


def test_of_machines_that_are_nearly_alike_the_slowest_counts(tmp_path, capsys):
    images = {"data": "imagenet", "by_rank": {1: {"backward": 0.09}}}
    basis = read_basis(Measured(tmp_path / "measured" / NAME, **images).write())
    assert [round(step.work, 3) for step in basis.steps] == [0.128, 0.138, 0.138]
    _, (out, _) = plan(tmp_path, capsys, *HERE)
    # Images of one's own give the time of epochs.
    assert "90 epochs" in out and "noise" not in out and "BALANCE" not in out


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("--machines", "node1,node2,node4"), {}),
        ((*HERE, "--batch", "64"), {}),
        ((*HERE, "--image-size", "32"), {}),
        (HERE, {"made": time.time() - 8 * 86400}),
    ],
)
def test_what_was_measured_of_something_else_is_not_taken(tmp_path, capsys, words, settings):
    Measured(tmp_path / "measured" / NAME, **settings).write()
    code, (_, err) = plan(tmp_path, capsys, *words)
    assert code == 3 and "`make plan NODES=3 MODEL=resnet50" in err
    assert not list(tmp_path.glob("plan-*"))


def test_the_newest_of_runs_and_measurements_is_taken_for_any_of_its_machines(tmp_path, capsys):
    Measured(tmp_path / "measured" / NAME).write()
    words = ("--machines", "node1,node2,node9", "--precision", "auto", "--batch", "32")
    assert plan(tmp_path, capsys, *words, "--nodes", "2")[0] == 0
    for run, newest in ((None, NAME), ("20261122T110000Z-resnet50-4n", NAME), (NEWER, NEWER)):
        if run:
            RunBuilder(tmp_path / run).write()
        assert plan(tmp_path, capsys, *HERE)[0] == 0
        assert kept(tmp_path)["from_run"] == newest


def test_half_a_measurement_predicts_nothing_that_it_did_not_measure(tmp_path, capsys):
    folder = Measured(tmp_path / "measured" / NAME).write()
    links = folder / "nodes/node2/links.json"
    odd = ['{"pairs": 3, "ring": {"mbit": "fast"}}', '{"pairs": {"node3": 3}, "ring": []}']
    odd.append(links.read_text().replace('"latency_ms": 0.1', '"latency_ms": null', 1))
    for text in odd:
        links.write_text(text)
        assert read_basis(folder).rates == ()
    for path, odd in (
        (folder / "nodes/node3/rank0.1.steps.jsonl", ""),
        (folder / "attempts.json", '{"status": "failed", "attempts": []}'),
    ):
        before = path.read_text()
        path.write_text(odd)
        assert plan(tmp_path, capsys, *HERE)[0] == 3
        path.write_text(before)
    assert plan(tmp_path, capsys, *HERE)[0] == 0


def test_where_no_datagram_passes_links_are_known_but_for_the_size_of_packets(tmp_path, capsys):
    folder = Measured(tmp_path / "measured" / NAME, mtu=None).write()
    assert len(read_basis(folder).rates) == 3
    said = " ".join(plan(tmp_path, capsys, *HERE, "--all")[1].out.split())
    assert "0.20 - node1 - node3" in said and "Packets of" not in said


MACHINES = ("node1", "node2", "node3")
# At half the speed of the others; beside it, at two thirds.
SLOW = {2: {"backward": 0.208}}


def asked(batch=32, machines=MACHINES):
    return runs.Setting("resnet50", batch, None, None, machines)


def named(days, nodes):
    return runs.run_id("resnet50", nodes, time.time() - days * 86400)


def test_speeds_are_the_newest_of_plan_and_run_in_one_proportion(tmp_path):
    """node3 was measured by `make plan` alone; the run after it was half as fast as that."""
    Measured(tmp_path / "measured" / named(2, 3), by_rank=SLOW).write()
    assert newest_speeds(tmp_path, asked()) == pytest.approx(
        {"node1": 250, "node2": 250, "node3": 125}, abs=0.1
    )
    twice = {"forward": 0.168}
    RunBuilder(tmp_path / named(1, 2), nodes=2, step=twice).write()
    assert newest_speeds(tmp_path, asked()) == pytest.approx(
        {"node1": 125, "node2": 125, "node3": 62.5}, abs=0.1
    )


def test_another_batch_serves_where_none_was_measured_with_this_one(tmp_path):
    Measured(tmp_path / "measured" / named(2, 3), by_rank=SLOW).write()
    speeds = newest_speeds(tmp_path, asked(batch=48))
    assert speeds["node1"] / speeds["node3"] == pytest.approx(2, abs=0.01)
    other = {0: {"backward": 0.208}}
    Measured(tmp_path / "measured" / named(1, 3), by_rank=other, batch=64).write()
    speeds = newest_speeds(tmp_path, asked())  # the older one, for it had this batch
    assert speeds["node1"] / speeds["node3"] == pytest.approx(2, abs=0.01)


def test_what_is_old_damaged_or_of_other_machines_says_nothing_of_speeds(tmp_path):
    Measured(tmp_path / "measured" / named(runs.DAYS + 1, 3)).write()
    folder = Measured(tmp_path / "measured" / named(1, 3)).write()
    assert newest_speeds(tmp_path, asked(machines=("pc1", "node1"))) == pytest.approx(
        {"node1": 250}, abs=0.1
    )
    (folder / "plan.json").write_text("[")
    assert newest_speeds(tmp_path, asked()) == {}
