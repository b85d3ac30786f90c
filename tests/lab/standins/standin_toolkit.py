"""Stand-ins for NVIDIA's files: a runfile, cuDNN's and NCCL's archives, apex's source.

In the vendor's layout, and as picky about flags; what they install says "standin". Each file's name
begins with standin-.
"""

import hashlib
import io
import tarfile
from pathlib import Path

VERSION = "10.2.89"
# A shell header with a tar archive behind it, as makeself makes them. It does what was noted of
# NVIDIA's: it crashes over an old log, needs its temporary folder, and moves /usr/local/cuda.
RUNFILE = r"""#!/bin/sh
# standin for cuda_10.2.89_440.33.01_linux.run
fail() { echo "standin: $*" >&2; exit 1; }
path= tmp= silent= override= toolkit=
for word; do
    case $word in
    --silent) silent=1 ;;
    --override) override=1 ;;
    --toolkit) toolkit=1 ;;
    --installpath=/*) path=${word#*=} ;;
    --tmpdir=/*) tmp=${word#*=} ;;
    *) fail "unknown flag $word" ;;
    esac
done
[ "$silent$override$toolkit" = 111 ] || fail "needs --silent --override --toolkit"
[ -n "$path" ] && [ -d "$tmp" ] || fail "needs --installpath and a --tmpdir that is there"
[ ! -e /tmp/cuda-installer.log ] || { kill -SEGV $$; exit 139; }
[ "$(id -u)" = 0 ] || fail "needs root"
echo "standin log" >/tmp/cuda-installer.log
ln -sfn "$path" /usr/local/cuda
tail -n +__LINES__ "$0" | tar -x -C "$tmp" || fail "no space left in $tmp"
mkdir -p "$path" && cp -a "$tmp/toolkit/." "$path" || fail "no space left in $path"
# For tests that end it in the middle: a folder to write into says that it waits.
if [ -d /run/standin-waits ]; then
    touch /run/standin-waits/here
    while [ -d /run/standin-waits ]; do sleep 0.1; done
fi
sed -i "s|@PATH@|$path|" "$path/pkgconfig/cuda.pc"
ln -s "$path/include" "$path/absolute-link"
rm "$path/big" 2>/dev/null
exit 0
"""
NVCC = """#!/bin/sh
echo "standin nvcc: Cuda compilation tools, release 10.2, V10.2.89"
"""


def add(tar, name, content, mode=0o644):
    member = tarfile.TarInfo(name)
    data = content if isinstance(content, bytes) else content.encode()
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))


def link(tar, name, target):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    tar.addfile(member)


def runfile(path: Path, big: int = 0) -> Path:
    """NVIDIA's layout: include and lib64 are links. `big`: bytes that it needs meanwhile."""
    payload = io.BytesIO()
    with tarfile.open(fileobj=payload, mode="w") as tar:
        add(tar, "toolkit/bin/nvcc", NVCC, 0o755)
        add(tar, "toolkit/version.txt", f"CUDA Version {VERSION} standin\n")
        add(tar, "toolkit/pkgconfig/cuda.pc", "cudaroot=@PATH@\n")
        add(tar, "toolkit/targets/x86_64-linux/include/cuda.h", "// standin\n")
        add(tar, "toolkit/targets/x86_64-linux/lib/libcudart.so.10.2", b"standin\0")
        link(tar, "toolkit/include", "targets/x86_64-linux/include")
        link(tar, "toolkit/lib64", "targets/x86_64-linux/lib")
        if big:
            add(tar, "toolkit/big", bytes(big))
    header = RUNFILE.replace("__LINES__", str(RUNFILE.count("\n") + 1))
    path.write_bytes(header.encode() + payload.getvalue())
    return path


def archive(path: Path, root: str, lib: str, header: str, library: str) -> Path:
    """cuDNN's or NCCL's: `root`/include/`header`, `root`/`lib`/`library` with its links."""
    with tarfile.open(path, f"w:{'gz' if path.suffix == '.tgz' else 'xz'}") as tar:
        add(tar, f"{root}/include/{header}", f"// standin {path.name}\n")
        add(tar, f"{root}/{lib}/{library}", b"standin\0")
        short = library.split(".so")[0] + ".so"
        link(tar, f"{root}/{lib}/{short}", library)
    return path


SETUP = """
import os
import subprocess
import sys
from packaging.version import parse
from setuptools import setup
assert parse("1.0")
# NVIDIA's setup.py takes its own flags off the command line, too.
extensions = [flag for flag in ("--cpp_ext", "--cuda_ext") if flag in sys.argv]
for flag in extensions:
    sys.argv.remove(flag)
local = "standin.ext" if extensions else "standin"
# torch's BuildExtension takes CXX for C++ and hands CC to nvcc; here both say who they are.
asked = [os.environ.get(name, "none") for name in ("CC", "CXX")]
for name in filter("none".__ne__, list(asked)):
    asked.append(subprocess.check_output([name, "-dumpversion"], text=True))
open("apex/built.py", "w").write("BY = %r" % asked)
setup(name="apex", version="0.1+" + local, packages=["apex", "apex.amp"])
"""
AMP = """
def initialize(models, optimizers=None, opt_level="O1", **_):
    return models, optimizers


def scale_loss(loss, optimizers):
    raise NotImplementedError("standin")
"""


def apex(path: Path, amp: bool = True) -> Path:
    """As GitHub packs a tag: one folder apex-<tag>. Without `amp`: as of 25.07."""
    root = "apex-22.04-dev"
    with tarfile.open(path, "w:gz") as tar:
        add(tar, f"{root}/setup.py", SETUP if amp else SETUP.replace(', "apex.amp"', ""))
        add(tar, f"{root}/apex/__init__.py", "STANDIN = True\n")
        if amp:
            add(tar, f"{root}/apex/amp/__init__.py", AMP)
    return path


def write_all(folder: Path) -> dict:
    """Every stand-in in a bundle of its own, and the table that names them instead of NVIDIA's."""
    kit, source = folder / "installers/toolkit-10.2", folder / "installers/apex-22.04-dev"
    kit.mkdir(parents=True)
    source.mkdir(parents=True)
    parts = {
        "cuda": (VERSION, runfile(kit / "standin-cuda_10.2.89_linux.run")),
        "cudnn": (
            "8.0.5.39",
            archive(kit / "standin-cudnn.tgz", "cuda", "lib64", "cudnn.h", "libcudnn.so.8.0.5"),
        ),
        "nccl": (
            "2.12.7",
            archive(kit / "standin-nccl.txz", "nccl_2.12.7", "lib", "nccl.h", "libnccl.so.2.12.7"),
        ),
    }
    rows = [entry(name, version, path) for name, (version, path) in parts.items()]
    # As files behind a login without a published figure: that of the first use counts.
    rows[1]["sha256"] = None
    apex_row = entry("apex", "22.04-dev", apex(source / "standin-apex-22.04-dev.tar.gz"))
    return {"toolkits": {"10.2": rows}, "apex": {"22.04-dev": {**apex_row, "sha256": None}}}


def entry(name: str, version: str, path: Path) -> dict:
    return {
        "name": name,
        "version": version,
        "file": path.name,
        "url": None,
        "page": "https://developer.invalid/standin",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
