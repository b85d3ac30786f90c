"""The plan: who gets which ranks, command, environment; what cannot be planned."""

import shlex

import pytest

from contract.errors import UserError
from contract.options import Config
from launcher import measure
from launcher.look import OpenMachines
from launcher.plan import plan
from launcher.plan import plan as making
from launcher.watch.guards import make_task
from tests.unit.launcher.launcher_values import (
    build,
    facts,
    gpus,
    host,
    refused,
    sent_to_trainer,
)


def test_node_ranks_follow_the_inventory_and_ranks_the_gpus():
    hosts = [host(2), host(1), host(3)]
    found = [facts(2, gpus=gpus(1)), facts(1, gpus=gpus(2)), facts(3, gpus=gpus(4))]
    made = build(hosts, found)
    assert [(n.host, n.node_rank, n.ranks) for n in made.nodes] == [
        ("node2", 0, (0,)),
        ("node1", 1, (1, 2)),
        ("node3", 2, (3, 4, 5, 6)),
    ]
    assert (made.world_size, made.master_addr) == (7, "192.0.2.2")
    assert all("--master_addr=192.0.2.2" in node.argv for node in made.nodes)
    assert [a for a in made.nodes[2].argv if "nproc" in a] == ["--nproc_per_node=4"]


def test_cards_are_named_exactly_for_nccl():
    env = build([host(1)], [facts(1)]).nodes[0].env
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eno1", "=eno1")
    assert env["NCCL_IB_DISABLE"] == "1"


def test_two_cards_are_an_error_unless_the_inventory_decides():
    found = facts(1, interfaces={"192.0.2.2": "eno1", "192.0.2.3": "tun0"})
    with refused("several-cards"):
        making.choose_interface(host(1), found)
    assert making.choose_interface(host(1, interface="eno1"), found) == "eno1"


def test_cores_are_shared_by_ranks_and_by_nodes_on_one_machine():
    alone = build([host(1)], [facts(1, gpus=gpus(2))])
    assert alone.nodes[0].env["OMP_NUM_THREADS"] == "4"
    same = [facts(n, machine="one", cores=8) for n in (1, 2, 3)]
    shared = build([host(1), host(2), host(3)], same)
    assert {node.env["OMP_NUM_THREADS"] for node in shared.nodes} == {"2"}


def test_the_folder_of_one_s_own_model_is_told_to_the_trainer():
    name = "/home/anna/models/net.py:build"
    made = build([host(1)], [facts(1)], Config(trainer={"model": name}), {"model": name}).nodes[0]
    assert made.env["TANDEM_MODEL_FOLDER"] == "own"
    assert sent_to_trainer(made)["model"] == name  # as in checkpoints and records
    assert "TANDEM_MODEL_FOLDER" not in build([host(1)], [facts(1)]).nodes[0].env


def test_ports_are_free_and_never_used_twice():
    assert build([host(1)], [facts(1)]).master_port == 29500
    later = build([host(1)], [facts(1)], used_ports=frozenset({29500}), attempt=2, checkpoint="")
    assert later.master_port == 29501
    assert "--rdzv_id=r-2" in later.nodes[0].argv
    assert later.nodes[0].argv[-2:] == ("--resume", "auto")
    assert "--resume" not in build([host(1)], [facts(1)]).nodes[0].argv


def test_a_port_in_use_is_refused():
    with refused("port-taken"):
        build([host(1)], [facts(1)], Config(port=22))


def test_a_loopback_master_is_refused_for_other_machines():
    with refused("master-loopback"):
        build([host(1, address="127.0.1.1"), host(2)], [facts(1), facts(2)])


def test_paths_lie_below_the_home_of_the_run_user():
    node = build([host(1)], [facts(1)]).nodes[0]
    assert (node.cwd, node.output) == (
        "/home/tandem/tandem/code/c0dec0dec0de",
        "/home/tandem/tandem/runs/r",
    )
    assert node.env["TANDEM_DATA"] == "/srv/tandem/data/digits"
    given = build([host(1)], [facts(1)], Config(data="/mnt/imagenet")).nodes[0]
    assert given.data == "/mnt/imagenet"
    with pytest.raises(UserError, match="an absolute path"):
        build([host(1)], [facts(1)], Config(data="some/folder"))


def test_variables_of_a_host_win_and_survive_quoting():
    odd = "a b'c\"d$HOME\n`e`\\"
    hosts, known = [host(1, env={"ODD": odd, "OMP_NUM_THREADS": "3"})], facts(1)
    shown = plan.render(build(hosts, [known]), OpenMachines(hosts, {}, {"node1": known}))
    words = shlex.split(shown.partition("\ncd ")[2])
    assert f"ODD={odd}" in words
    assert "OMP_NUM_THREADS=3" in words


def test_a_chosen_toolkit_is_told_and_no_library_path_ever():
    toolkit = host(1, cuda_home="/usr/local/cuda-10.2")
    chosen, other = build([toolkit, host(2)], [facts(1), facts(2)]).nodes
    assert chosen.env["CUDA_HOME"] == "/usr/local/cuda-10.2"
    assert chosen.env["PATH"].split(":")[:2] == ["/usr/local/cuda-10.2/bin", "/usr/local/sbin"]
    assert not {"CUDA_HOME", "PATH"} & set(other.env)
    assert "LD_LIBRARY_PATH" not in {**chosen.env, **other.env}


def test_dry_run_shows_the_very_bytes_that_are_sent():
    options = Config(trainer={"model_args": '{"x": "0.1 x"}'})
    hosts, found = [host(1), host(2)], [facts(1), facts(2)]
    made = build(hosts, found, options)
    machines = OpenMachines(hosts, {}, {one.host: one for one in found})
    shown = [line for line in plan.render(made, machines).splitlines() if line.startswith("cd ")]
    for node, line in zip(made.nodes, shown):
        sent = make_task(made, node)
        words = shlex.split(line)
        assert words[:4] == ["cd", sent["cwd"], "&&", "env"]
        variables = dict(word.split("=", 1) for word in words[4 : 4 + len(sent["env"])])
        assert variables == sent["env"]
        assert words[4 + len(sent["env"]) :] == sent["argv"]


def test_the_ranks_of_a_measurement_have_no_peers_to_meet():
    hosts, found = [host(1), host(2)], {"node1": facts(1), "node2": facts(2)}
    made = build(hosts, [*found.values()])
    assert len(make_task(made, made.nodes[0])["peers"]) == 2
    alone = measure.separate_nodes(made, found, {})
    assert [make_task(alone, node)["peers"] for node in alone.nodes] == [[], []]


def test_only_rank_0_shows_a_bar_as_wide_as_the_terminal_leaves():
    made = build([host(1), host(2)], [facts(1), facts(2)], columns=80)
    first, second = (node.env for node in made.nodes)
    assert (first["TANDEM_PROGRESS"], first["COLUMNS"]) == ("bar", str(79 - len("[node1 1] ")))
    assert "TANDEM_PROGRESS" not in second
    assert "COLUMNS" not in build([host(1)], [facts(1)]).nodes[0].env
