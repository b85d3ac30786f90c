#!/bin/sh
# Installs the missing Debian packages of the lists in $@ (a package per line, # for comments). Needs root.
set -eu
missing=
for package in $(sed 's/#.*//' "$@"); do
    if ! dpkg-query --show --showformat='${db:Status-Status}\n' "$package" 2>/dev/null | grep -q '^installed$'; then
        missing="$missing $package"
    fi
done
if [ -z "$missing" ]; then exit 0; fi
echo "tandem: installing$missing"
# Nobody can answer questions here. Another program may hold apt's lock for some minutes.
export DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a
apt-get -o DPkg::Lock::Timeout=600 update --quiet --quiet
# shellcheck disable=SC2086  # a list of package names
apt-get -o DPkg::Lock::Timeout=600 install --yes --quiet --no-install-recommends $missing
