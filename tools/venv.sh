#!/bin/sh
# Makes an environment from a locked list: tools/venv.sh control|dev makes .venv, core2.16 makes .venv-core2.16 (another
# Ansible, for machines with an old Python). Does nothing if it exists already.
set -eu
cd "$(dirname "$0")/.."
list=requirements/$1.txt
case $1 in
control | dev) folder=.venv fits='>= 3.11' good='sys.version_info >= (3, 11)' ;;
core2.16) folder=.venv-$1 fits='3.10 to 3.12' good='(3, 10) <= sys.version_info < (3, 13)' ;;
*)
    echo "tandem: there is no environment $1: CORE may be 2.16, or be left out" >&2
    exit 1
    ;;
esac
stamp=$folder/.$1-$(sha256sum "$list" | cut -c1-12)
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

if [ ! -x "$folder/bin/python" ] || ! "$folder/bin/python" -c '' 2>/dev/null; then
    rm -rf "$folder"
    "$python" -m venv "$folder"
fi
if [ "$folder" = .venv ]; then whole=6200; else whole=320; fi # MB
echo "tandem: installing $list into $folder (once; about $whole MB)"

# pip unpacks here rather than in /tmp, which may be memory; this also lets its progress be measured.
scratch=$PWD/$folder/.installing
rm -rf "$scratch"
mkdir "$scratch"
megabytes() {
    du -sm "$1" 2>/dev/null | cut -f1
}
say_how_far() { # until this script ends
    begun=$(date +%s)
    while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        here=$(megabytes "$folder") fetched=$(megabytes "$scratch")
        echo "tandem: installing, $(($(date +%s) - begun)) s: $fetched MB downloaded, $((here - fetched)) of $whole MB unpacked"
    done
}
say_how_far &
teller=$!
trap 'kill $teller 2>/dev/null; rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
TMPDIR=$scratch "$folder/bin/pip" install --quiet --disable-pip-version-check --no-compile --requirement "$list"
# Compiled on all cores, where pip uses one, and without Ansible's collections, half of all code: most of it is sent to
# machines as text. What does not compile is for another Python, or a template.
"$folder/bin/python" -m compileall -q -q -j 0 -x ansible_collections "$folder/lib" || :
touch "$stamp"
if [ "$1" = dev ]; then # dev.txt holds all of control.txt
    touch ".venv/.control-$(sha256sum requirements/control.txt | cut -c1-12)"
fi
