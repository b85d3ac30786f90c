"""`make poweroff` on machines of the lab: not while a run holds one, not without a yes."""

from tests.lab.site_plays import play, said, write_inventory

BOOK = "ansible/playbooks/poweroff.yml"
# What a guard leaves in the kernel while it lives: launcher/node/machine_lock.py.
HOLD = (
    "import socket, time; mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
    "mark.bind(chr(0) + 'tandem/7/some-run/anna@desk'); time.sleep(600)"
)


def answers(lab, node):
    """Whether something listens at a machine's ssh port."""
    line = f"echo > /dev/tcp/192.168.56.{110 + node}/22"
    return lab.control("timeout", "5", "bash", "-c", line, check=False).returncode == 0


def test_machines_are_switched_off_after_a_yes_where_nobody_trains(pair, tmp_path):
    hosts = {f"node{number}": f"ansible_host=192.168.56.{110 + number}" for number in (1, 2)}
    words = [BOOK, "--inventory", write_inventory(tmp_path, hosts)]
    pair.ssh(
        2, f'setsid python3 -c "{HOLD}" >/tmp/holder.log 2>&1 </dev/null & echo $! >/tmp/holder'
    )
    pair.ssh(2, "timeout 60 sh -c 'until grep -q @tandem/ /proc/net/unix; do sleep 0.1; done'")
    held = play(pair, *words, "-e", "poweroff_sure=true", check=False)
    assert held.returncode and "node2 is in use by anna@desk: run some-run." in said(held)
    pair.ssh(2, "kill $(cat /tmp/holder)")

    unsure = play(pair, *words, check=False)  # nobody can be asked here
    assert unsure.returncode and "Nothing was switched off." in said(unsure)
    assert answers(pair, 1) and answers(pair, 2)

    play(pair, *words, "-e", "poweroff_sure=true")
    assert not answers(pair, 1) and not answers(pair, 2)
