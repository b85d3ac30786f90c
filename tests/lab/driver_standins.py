"""Machines of the lab with stand-ins for a card, its kernel and its driver's packages."""

import hashlib
import io
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path

import yaml

from tests.lab.apt_archive import index_of
from tests.lab.site_plays import write_inventory
from tests.unit.ansible.driver_machines import ubuntu_relations

STANDINS = Path(__file__).parent / "standins"
KERNEL = platform.release()  # the lab's machines have the host's
TURING = "1e07"
MODULE = f"/lib/modules/{KERNEL}/updates/dkms/nvidia.ko"
TEMPLATE = "Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: Tandem's tests\n"
APT = """\
echo 'deb [trusted=yes] copy:/opt/standin/archive ./' > /etc/apt/sources.list
rm -f /etc/apt/sources.list.d/*
apt-get -q update
"""
# Sets what preflight would leave behind, then runs the role.
PLAY = """\
- name: The driver
  hosts: cluster
  become: true
  gather_facts: false
  vars:
    offline: false
    table: "{{ lookup('ansible.builtin.file', checkout ~ '/ansible/stacks.yml') | from_yaml }}"
    preflight_facts: "{{ collected.facts | combine({'host': inventory_hostname}) }}"
    preflight_stack: "{{ [preflight_facts] | tandem_stack(stack, table.stacks) }}"
  pre_tasks:
    - name: Collect
      machine_facts:
        address: "{{ ansible_host }}"
      register: collected
  roles: [driver]
"""
VERIFY = PLAY.replace(
    "  roles: [driver]\n",
    "  tasks:\n    - ansible.builtin.include_role: {name: driver, tasks_from: verify}\n",
)
UNINSTALL = """- name: Take the driver away
  hosts: cluster
  gather_facts: false
  become: true
  tasks:
    - name: Take it away
      ansible.builtin.include_role:
        name: driver
        tasks_from: uninstall
"""
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def write_runfile(folder: Path, version: str = "580.126.20") -> tuple[Path, str]:
    """A stand-in for NVIDIA's installer of `version`, and its SHA-256."""
    text = (STANDINS / "standin-runfile").read_text().replace("@VERSION@", version)
    path = folder / f"standin-NVIDIA-Linux-x86_64-{version}.run"
    path.write_text(text)
    return path, hashlib.sha256(text.encode()).hexdigest()


def build_deb(
    folder: Path,
    name: str,
    version: str,
    depends: str = "",
    files: dict[str, str] | None = None,
    postinst: str = "",
    prerm: str = "",
    fields: dict[str, str] | None = None,
) -> None:
    """A stand-in package; `files`: {path: text}, those of usr/bin executable; `fields`: others of
    its control file."""
    tree = folder / "tree"
    control = TEMPLATE.format(name=name, version=version)
    control += "".join(f"{field}: {value}\n" for field, value in (fields or {}).items())
    control += f"Depends: {depends}\n" if depends else ""
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(control + "Description: stand-in of the lab's tests\n")
    for script, text in (("postinst", postinst), ("prerm", prerm)):
        if text:
            (tree / "DEBIAN" / script).write_text(f"#!/bin/sh\nset -e\n{text}")
            (tree / "DEBIAN" / script).chmod(0o755)
    for path, text in (files or {}).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
        (tree / path).chmod(0o755 if path.startswith("usr/bin") else 0o644)
    target = folder / f"standin-{name}_{version.replace(':', '%3a')}.deb"
    build = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, target]
    subprocess.run(build, check=True, capture_output=True)
    subprocess.run(["rm", "-r", tree], check=True)


def build_driver(folder: Path, version: str) -> None:
    """A driver's packages, divided as Debian's are."""
    deb, short = f"{version}-1", version
    fails = "if [ -e /opt/standin/no-build ]; then echo Bad return status >&2; exit 10; fi\n"
    module = f"mkdir -p {MODULE.rpartition('/')[0]}\necho {short} >{MODULE}\n"
    slow = "while [ -e /opt/standin/slow ]; do : >/run/standin-half; sleep 0.1; done\n"
    register = f"echo {short} >/opt/standin/registered\n"
    firmware = {f"usr/lib/firmware/nvidia/{short}/gsp_tu10x.bin": "standin " * 50_000}
    build_deb(folder, "firmware-nvidia-gsp", deb, files=firmware)
    depends = f"dkms, firmware-nvidia-gsp (= {deb})"
    build_deb(folder, "nvidia-kernel-dkms", deb, depends, postinst=slow + fails + register + module,
              prerm=f"rm -f {MODULE} /opt/standin/registered\n")  # fmt: skip
    library = {f"{LIBRARIES}/libnvidia-ml.so.{short}": ""}
    link = f"ln -sf libnvidia-ml.so.{short} /{LIBRARIES}/libnvidia-ml.so.1\n"
    build_deb(folder, "libnvidia-ml1", deb, files=library, postinst=link,
              prerm=f"rm -f /{LIBRARIES}/libnvidia-ml.so.1\n")  # fmt: skip
    smi = {"usr/bin/nvidia-smi": (STANDINS / "standin-nvidia-smi").read_text()}
    build_deb(folder, "nvidia-smi", deb, f"libnvidia-ml1 (= {deb})", files=smi)
    build_deb(folder, "libcuda1", deb)


def build_ubuntu(folder: Path, version: str, modules: str) -> None:
    """A driver and modules that were signed for driver `modules`, related as Ubuntu's packages."""
    short, name = version.partition("-")[0], "nvidia.ko"
    signed = f"lib/modules/{KERNEL}/kernel/nvidia/{name}"
    smi = (STANDINS / "standin-nvidia-smi").read_text()
    files = {
        "libnvidia-compute-580": {f"{LIBRARIES}/libnvidia-ml.so.{short}": ""},
        "nvidia-utils-580": {"usr/bin/nvidia-smi": smi},
        f"linux-modules-nvidia-580-open-{KERNEL}": {signed: f"{modules.partition('-')[0]}\n"},
    }
    scripts = {
        "libnvidia-compute-580": f"ln -sf libnvidia-ml.so.{short} /{LIBRARIES}/libnvidia-ml.so.1\n",
        "nvidia-dkms-580-open": f"mkdir -p {MODULE.rpartition('/')[0]}\necho {short} >{MODULE}\n",
    }
    for package, told in ubuntu_relations(version, modules, KERNEL, "standin").items():
        fields = {field: value for field, value in told.items() if field != "Version"}
        build_deb(folder, package, told["Version"], files=files.get(package),
                  postinst=scripts.get(package, ""), fields=fields)  # fmt: skip


def build_tools(folder: Path) -> None:
    """The packages that building a module needs, and a kernel's metapackage."""
    for name in ("gcc", "make"):
        build_deb(folder, name, "1")
    build_deb(folder, "dkms", "1", files={"var/lib/dkms/standin": ""})
    build = {f"lib/modules/{KERNEL}/build/Makefile": ""}
    build_deb(folder, f"linux-headers-{KERNEL}", "1", files=build)
    build_deb(folder, "linux-image-amd64", "6.1.1-1")


def build_series(folder: Path, version: str) -> None:
    """The metapackages of a series of kernels, which bring kernel and headers."""
    build_deb(folder, f"linux-image-{KERNEL}", "1")
    for what in ("image", "headers"):
        build_deb(folder, f"linux-{what}-amd64", version, f"linux-{what}-{KERNEL}")


def build_archive(folder: Path, version: str = "") -> Path:
    """A folder that apt reads: what building needs and, if wanted, a driver's packages."""
    archive = folder / "archive"
    archive.mkdir()
    build_tools(archive)
    if version:
        build_driver(archive, version)
    index(archive)
    return archive


def write_words(folder: Path, nodes: int = 1) -> list[str]:
    """The words of ansible-playbook that give the first `nodes` machines their driver."""
    (folder / "play.yml").write_text(PLAY)
    more = f"stack=cu102 checkout={STANDINS.parents[2]}"
    hosts = {f"node{n}": f"ansible_host=192.168.56.{110 + n} {more}" for n in range(1, nodes + 1)}
    return [str(folder / "play.yml"), "--inventory", write_inventory(folder, hosts)]


def write_upgrade(folder: Path, words: list[str]) -> list[str]:
    """The words that run what ansible/playbooks/upgrade.yml does to machines, without site.yml."""
    book = STANDINS.parents[2] / "ansible/playbooks/upgrade.yml"
    (first,) = yaml.safe_load(PLAY)
    plays = [play for play in yaml.safe_load(book.read_text()) if play.get("hosts") == "upgraded"]
    for play in plays:
        play["vars"] |= first["vars"] | {"proxy_environment": {}, "driver_policy": "install"}
    plays[0]["pre_tasks"] = first["pre_tasks"]
    shutil.copytree(book.parent / "tasks", folder / "tasks")
    (folder / "upgrade.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
    inventory = Path(words[-1])
    inventory.write_text(inventory.read_text() + "[upgraded:children]\ncluster\n")
    return [str(folder / "upgrade.yml"), *words[1:]]


def index(folder: Path) -> None:
    """The archive's Packages, for all packages of `folder`."""
    text = index_of(folder)
    (folder / "Packages").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    entry = f" {digest} {len(text.encode())} Packages\n"
    (folder / "Release").write_text(f"Origin: standin\nSuite: standin\nSHA256:\n{entry}")


def cut_power_halfway(lab, node: int, *words: str) -> None:
    """A play during which the machine loses power where a stand-in waits; it is on again then."""
    lab.ssh(node, "sudo touch /opt/standin/slow")
    argv = lab.argv("exec", "--", "ansible-playbook", *words)
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    cut_off = subprocess.Popen(argv, cwd=lab.checkout, **options)
    half = "until [ -e /run/standin-half ]; do sleep 0.1; done"
    lab.ssh(node, f"timeout 120 sh -c '{half}'")
    lab("kill", str(node))
    cut_off.communicate(timeout=120)
    assert cut_off.returncode != 0
    lab("mend", str(node))
    lab.ssh(node, "sudo rm /opt/standin/slow")


def fill_firmware_disk(lab, node: int) -> None:
    """Makes a disk on which only the driver's firmware finds no room."""
    place = "/usr/lib/firmware/nvidia"
    lab.ssh(node, f"sudo mkdir -p {place}; sudo mount -t tmpfs -o size=64k standin {place}")


def send(lab, node: int, files: dict[str, bytes]) -> None:
    """Copies files to a machine, as root, to their absolute paths."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    target = f"tandem@192.168.56.{110 + node}"
    lab.control("ssh", target, "sudo tar -C / -xf -", input=memory.getvalue(), text=False)


def start_powerd(lab, node: int) -> None:
    """A service of NVIDIA's that has the card open, and that no boot starts."""
    unit = "/run/systemd/system/nvidia-powerd.service"
    send(lab, node, {unit: b"[Service]\nExecStart=/bin/sleep infinity\n"})
    lab.ssh(node, "sudo systemctl daemon-reload; sudo systemctl start nvidia-powerd")


def start_desktop(lab, node: int) -> None:
    """Gives a machine a display, with a session at its seat."""
    path = "/opt/standin/standin-desktop"
    send(lab, node, {path: (STANDINS / "standin-desktop").read_bytes()})
    lab.ssh(node, f"sudo sh {path}")


def send_archive(lab, node: int, archive: Path) -> None:
    """Sets what apt on a machine may install."""
    place = "/opt/standin/archive"
    files = [path for path in archive.iterdir() if path.is_file()]
    send(lab, node, {f"{place}/{path.name}": path.read_bytes() for path in files})


def install(lab, node: int, archive: Path, card: str = TURING, kernel: bool = True) -> None:
    """Gives a machine its card and an archive of packages instead of its own.

    kernel: also stand-ins for its kernel and for the tools that ask it; a virtual machine has real
    ones, and only the list of its cards is made up.
    """
    device = "/opt/standin/pci/0000:01:00.0"
    files = {
        f"{device}/class": b"0x030000\n",
        f"{device}/vendor": b"0x10de\n",
        f"{device}/device": f"0x{card}\n".encode(),
    }
    if kernel:
        unit = "standin-kernel.service"
        files[f"/etc/systemd/system/{unit}"] = (STANDINS / unit).read_bytes()
        for name in ("standin-kernel", "standin-nvidia-smi"):
            files[f"/opt/standin/{name}"] = (STANDINS / name).read_bytes()
    send(lab, node, files)
    send_archive(lab, node, archive)
    links = "; ".join(
        f"ln -s /opt/standin/standin-kernel /usr/local/sbin/{name}"
        for name in ("modprobe", "modinfo", "dkms")
    )
    start = f"{links}; systemctl -q enable --now standin-kernel.service"
    bind = "mount --bind /opt/standin/pci /sys/bus/pci/devices"
    lab.ssh(node, f'sudo sh -ec "{APT}{start if kernel else bind}"')
