"""Boot nodes as virtual machines, for tests that need another kernel: NFS and SMB mounts, modules.

QEMU emulates the machines, because a host that is itself a virtual machine seldom offers more. An
emulated machine is ten times slower than a container (node.py).
"""

import hashlib
import lzma
import shutil
from pathlib import Path

from lab import base
from lab.plan import Lab, Node, System
from lab.shell import run

DISK_SIZE = "32G"  # as the machine sees it; the host stores only what is written
MODULES = ("virtio_pci", "virtio_blk", "virtio_net", "ext4")

# Runs before systemd. The machine's part of the initial RAM disk has put its files into /upper; the
# first boot copies them.
INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do /bin/busybox insmod "$module"; done
/bin/busybox mount -t ext4 /dev/vda /root
if [ ! -e /root/.installed ]; then
    /bin/busybox cp -a /upper/. /root/ && /bin/busybox touch /root/.installed
fi
exec /bin/busybox switch_root /root /lib/systemd/systemd
"""
ARCHIVE = 'cd "$1" && find . | cpio --quiet --create --format=newc >"$2"'
# Few inodes and a small journal, all written here, so that the machine has nothing to zero.
MAKE_DISK = "mke2fs -q -t ext4 -i 65536 -J size=64 -E lazy_itable_init=0,lazy_journal_init=0"


def folder(system: System) -> Path:
    """Return the folder with kernel, initrd and disk.ext4 that all virtual machines of a system
    share. Its name depends on the content, as base.folder's."""
    root = base.folder(system)
    content = "\n".join([*MODULES, INIT, MAKE_DISK, DISK_SIZE])
    return root.with_name(f"{root.name}.vm-{hashlib.sha256(content.encode()).hexdigest()[:12]}")


def ensure(system: System, lab: Lab) -> Path:
    return base.ensure_folder(folder(system), lab, lambda target: _make(system, target))


def _make(system: System, target: Path) -> None:
    root = base.folder(system)
    target.mkdir()
    # The base has exactly one kernel.
    version = next((root / "lib/modules").iterdir()).name
    shutil.copy(root / f"boot/vmlinuz-{version}", target / "kernel")
    initial = target / "initial"
    for name in ("bin", "dev", "modules", "root"):
        (initial / name).mkdir(parents=True)
    shutil.copy(root / "bin/busybox", initial / "bin")
    # MODULES and their dependencies, each once, in the order of loading.
    files: dict[Path, None] = {}
    for module in MODULES:
        query = ["modprobe", "--set-version", version, "--show-depends", module]
        # modprobe prints `insmod /lib/modules/6.1.0-18/kernel/fs/ext4/ext4.ko`, or `builtin ext4`.
        for line in run(["chroot", str(root), *query]).splitlines():
            if line.startswith("insmod "):
                files[root / line.split()[1].lstrip("/")] = None
    for number, file in enumerate(files):
        content = file.read_bytes()
        # Debian 13 compresses its modules, which busybox does not load.
        plain = lzma.decompress(content) if file.suffix == ".xz" else content
        (initial / f"modules/{number:02}-{file.name.removesuffix('.xz')}").write_bytes(plain)
    (initial / "init").write_text(INIT)
    (initial / "init").chmod(0o755)
    run(["sh", "-c", ARCHIVE, "sh", str(initial), str(target / "initrd")])
    shutil.rmtree(initial)
    # -d writes the base's files into the disk without mounting it.
    run([*MAKE_DISK.split(), "-d", str(root), str(target / "disk.ext4"), DISK_SIZE])


def write_disk(node: Node) -> None:
    """Make a node's disk on top of the shared one, and the initial RAM disk that installs its
    files."""
    shared, archive = folder(node.system), node.disk / "own.cpio"
    # The archive has the files in /upper, where INIT expects them.
    (node.disk / "initial").mkdir()
    (node.disk / "upper").rename(node.disk / "initial/upper")
    run(["sh", "-c", ARCHIVE, "sh", str(node.disk / "initial"), str(archive)])
    (node.disk / "initial/upper").rename(node.disk / "upper")
    # The kernel unpacks concatenated archives one after the other.
    (node.disk / "initrd").write_bytes((shared / "initrd").read_bytes() + archive.read_bytes())
    archive.unlink()
    backing = ["-b", str(shared / "disk.ext4"), "-F", "raw"]
    run(["qemu-img", "create", "-q", "-f", "qcow2", *backing, str(node.disk / "disk.qcow2")])


def make_emulator_command(lab: Lab, node: Node) -> list[str]:
    """Return the command of the emulator for `node`."""
    hardware = {
        "-accel": "tcg,thread=multi,tb-size=64",
        # Without cmpxchg16b, which Linux 6.12's allocator uses. QEMU 7.2 sometimes sets wrong flags
        # after it: 9 of 20 boots of Debian 13 panicked, without it none.
        "-cpu": "max,cx16=off",
        "-smp": str(lab.cpus),
        "-m": str(lab.megabytes),
        "-kernel": str(folder(node.system) / "kernel"),
        "-initrd": str(node.disk / "initrd"),
        "-append": "console=ttyS0 net.ifnames=0 quiet",
        "-drive": f"file={node.disk / 'disk.qcow2'},if=virtio",
        "-netdev": f"tap,id=lan,ifname={node.port},script=no,downscript=no",
        "-display": "none",
        "-monitor": "none",
        "-serial": "stdio",
    }
    interface = f"virtio-net-pci,netdev=lan,mac=52:54:00:38:00:{node.index:02x}"
    devices = ["-device", interface, "-device", "virtio-rng-pci"]
    words = [word for option in hardware.items() for word in option]
    return ["qemu-system-x86_64", "-nodefaults", *words, *devices]


def make_power_command(lab: Lab, node: Node, group: Path) -> list[str]:
    """Return the command that runs as long as `node` has power."""
    emulator = make_emulator_command(lab, node)
    enter = ["nsenter", f"--net=/run/netns/{lab.netns('control')}", *emulator]
    return ["sh", "-c", 'echo 0 >"$1/cgroup.procs"; shift; exec "$@"', "sh", str(group), *enter]
