#!/bin/sh
# Installs a locked list, requirements/$1.txt, unless it is installed already. In .venv: control (to provision, launch,
# watch and report), torch (to train on this machine), imagenet, tensorboard, dev (all lists, and packages for tests).
# In .venv-core2.16 and .venv-core2.21: another Ansible, for machines with an old or a new Python. The packages come
# from PIP_INDEX_URL or pip's own settings, or from the `mirror` of group_vars/all.yml if that is not `world`.
set -eu
cd "$(dirname "$0")/.."
folder=.venv fits='>= 3.11' good='sys.version_info >= (3, 11)'
case $1 in # MB on the disk, and the time of an installation over a line of 1 Gbit/s
control) whole=400 takes='half a minute' ;;
torch) whole=5600 takes='two minutes' ;;
imagenet) whole=220 takes='some seconds' ;;
tensorboard) whole=100 takes='some seconds' ;;
dev) whole=6200 takes='three minutes' ;;
core2.16)
    folder=.venv-$1 whole=320 takes='half a minute'
    fits='3.10 to 3.12' good='(3, 10) <= sys.version_info < (3, 13)'
    ;;
core2.21)
    folder=.venv-$1 whole=350 takes='half a minute'
    fits='>= 3.12' good='sys.version_info >= (3, 12)'
    ;;
*)
    echo "tandem: there is no environment $1: CORE may be 2.16 or 2.21, or be left out" >&2
    exit 1
    ;;
esac
list=requirements/$1.txt
# An empty file marks a complete installation. Its name has a checksum, so a changed list is installed again.
stamp_of() {
    echo "$folder/.$1-$(sha256sum "requirements/$1.txt" | cut -c1-12)"
}
stamp=$(stamp_of "$1")
if [ -e "$stamp" ]; then exit 0; fi

python=
for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c "import sys, venv, ensurepip; sys.exit(not ($good))" 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    cat >&2 <<END
tandem: no Python $fits with venv was found. Get one, then run the same command again:
  Debian 12 or newer, Ubuntu 24.04:   sudo apt install python3-venv
  anything older (no root needed):    python3 -m pip install --user uv
                                      ~/.local/bin/uv python install 3.12
                                      PYTHON="\$(~/.local/bin/uv python find 3.12)" make demo
END
    exit 1
fi

# An upgrade of the system may have removed the Python that the environment links to.
if [ ! -x "$folder/bin/python" ] || ! "$folder/bin/python" -c '' 2>/dev/null; then
    rm -rf "$folder"
    "$python" -m venv "$folder"
fi
echo "tandem: installing $list into $folder (once; about $whole MB, $takes at 1 Gbit/s)"

settings=group_vars/all.yml
mirror=$(sed -n 's/^mirror: *\([A-Za-z0-9_-]*\).*/\1/p' $settings)
if [ -z "${PIP_INDEX_URL:-}" ] && [ "$mirror" != world ]; then
    PIP_INDEX_URL=$(sed -n "/^  $mirror:/,/^  [^ ]/s/^    pip: *//p" $settings)
    export PIP_INDEX_URL
fi
if [ -n "${PIP_INDEX_URL:-}" ]; then echo "tandem: from $PIP_INDEX_URL"; fi

# Downloads go into the environment's folder, since /tmp may be in memory and a user's cache on a small disk.
scratch=$PWD/$folder/.installing
rm -rf "$scratch"
megabytes() {
    du -sm "$folder" 2>/dev/null | cut -f1
}
before=$(megabytes)
mkdir "$scratch"
print_progress() { # until this script ends
    start=$(date +%s)
    while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        size=$(megabytes) # "" if files disappeared while du ran
        echo "tandem: installing, $(($(date +%s) - start)) s: $((${size:-$before} - before)) MB on the disk so far"
    done
}
print_progress &
printer=$!
trap 'kill $printer 2>/dev/null; rm -rf "$scratch" "$folder/.lock"' EXIT # uv makes .lock
trap 'exit 130' INT
trap 'exit 143' TERM
export TMPDIR="$scratch"
install_with_pip() {
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-compile --requirement "$1"
}
# uv needs about a third of pip's time. uv links files from its cache, which disappears with $scratch unless the user
# has named another cache.
install_with_uv() {
    # pip installs uv first, in the version of requirements/control.txt: the line "uv==..." and the hashes after it.
    if [ $folder = .venv ]; then
        sed -n '/^uv==/,/[^\\]$/p' requirements/control.txt >"$scratch/uv.txt"
        install_with_pip "$scratch/uv.txt" || return 1
    fi
    PYTHONPATH=$PWD UV_CACHE_DIR=${UV_CACHE_DIR:-$scratch/cache} "$folder/bin/python" -m launcher.plan.pip_settings \
        "$scratch" .venv/bin/uv --quiet pip install --python "$folder/bin/python" --require-hashes --requirement "$list"
}
if ! install_with_uv; then
    echo "tandem: uv could not install $list, so pip installs it now"
    install_with_pip "$list"
fi
# compileall uses all cores, and pip only one. Ansible's collections are half of all code, but are sent to machines as
# text, so they need no compilation. Some files do not compile: they are templates, or for another Python.
"$folder/bin/python" -m compileall -q -q -j 0 -x ansible_collections "$folder/lib" || :
touch "$stamp"
if [ "$1" = dev ]; then # dev.txt contains these three lists
    touch "$(stamp_of control)" "$(stamp_of torch)" "$(stamp_of imagenet)"
fi
