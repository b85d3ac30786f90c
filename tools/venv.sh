#!/bin/sh
# Makes .venv from a locked list: tools/venv.sh control|dev. Does nothing when it is made already.
set -eu
cd "$(dirname "$0")/.."
list=requirements/$1.txt
stamp=.venv/.$1-$(sha256sum "$list" | cut -c1-12)
if [ -e "$stamp" ]; then exit 0; fi

good='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
python=
for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "$good" 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    cat >&2 <<'END'
tandem: no Python >= 3.11 with venv was found. Get one, then run the same command again:
  Debian 12 or newer, Ubuntu 24.04:   sudo apt install python3-venv
  anything older (no root needed):    python3 -m pip install --user uv
                                      ~/.local/bin/uv python install 3.12
                                      PYTHON="$(~/.local/bin/uv python find 3.12)" make demo
END
    exit 1
fi

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
    rm -rf .venv
    "$python" -m venv .venv
fi
echo "tandem: installing $list into .venv (torch with its CUDA libraries: about 5 GB, once)"
.venv/bin/pip install --quiet --disable-pip-version-check --requirement "$list"
touch "$stamp"
if [ "$1" = dev ]; then # dev.txt holds all of control.txt
    touch ".venv/.control-$(sha256sum requirements/control.txt | cut -c1-12)"
fi
