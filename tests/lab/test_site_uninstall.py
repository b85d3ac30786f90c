"""uninstall.yml leaves a machine's disk as it was before the roles came."""

from tests.lab.disks import changed_files
from tests.lab.site_plays import changes, play, write_inventory, write_play

HOSTS = {
    "node1": "ansible_host=192.168.56.111 address=192.168.56.121",
    "node2": "ansible_host=192.168.56.112 address=192.168.56.122/24 network_mode=replace",
}


def test_the_disk_is_as_it_was(pair, tmp_path):
    before = {node: changed_files(pair, node) for node in (1, 2)}
    inventory = write_inventory(tmp_path, HOSTS)
    words = ["--inventory", inventory]
    play(pair, write_play(tmp_path, ["network", "identity", "firewall"]), *words,
         "-e", "network_update_inventory=true")  # fmt: skip
    assert changed_files(pair, 1) != before[1]
    play(pair, "ansible/playbooks/uninstall.yml", *words)
    tables = pair.control("ssh", "tandem@192.168.56.122", "sudo nft list tables").stdout
    assert tables == ""
    inside = changed_files(pair, 1).keys() - before[1].keys()
    assert "etc/systemd/network/10-lan.network.d/tandem.conf" in inside  # kept without its tag
    play(pair, "ansible/playbooks/uninstall.yml", *words, "--tags", "all,network")
    for node in (1, 2):
        assert changed_files(pair, node) == before[node]
        address = pair.ssh(node, "ip -4 -o address show eth0 | awk '{print $4}'")
        assert address == f"192.168.56.{110 + node}/24\n"
    write_inventory(tmp_path, {"node1": "ansible_host=192.168.56.111"})
    again = play(pair, "ansible/playbooks/uninstall.yml", *words)
    assert changes(again) == {"node1": 0}
