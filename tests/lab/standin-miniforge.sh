#!/bin/bash
# Stands in for Miniforge's installer, which the tests cannot have: the same options, bin/conda and bin/python. Its conda makes
# environments of the machine's own Python, and keeps what it was asked for in standin-calls.
set -eu
[ "$1 $2" = "-b -p" ] || { echo "expected -b -p DIR, got $*" >&2; exit 2; }
folder=$3
mkdir -p "$folder/bin"
cat >"$folder/bin/conda" <<END
#!/bin/bash
set -eu
echo "\$*" >>"$folder/standin-calls"
while [ "\$1" != --prefix ]; do shift; done
exec /usr/bin/python3 -m venv "\$2"
END
cat >"$folder/bin/python" <<END
#!/bin/bash
# What /etc/standin-python says is its version.
case "\$*" in *version_info*) if [ -e /etc/standin-python ]; then exec cat /etc/standin-python; fi ;; esac
exec /usr/bin/python3 "\$@"
END
chmod +x "$folder/bin/conda" "$folder/bin/python"
