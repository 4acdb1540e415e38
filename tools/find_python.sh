#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the Python interpreter to build the environment with, or says what is missing and fails.
#
#   tools/find_python.sh          python3.13, python3.12, python3, or one under pyenv; $PYTHON first of all
#   tools/find_python.sh 3.12     one of that version only; $PYTHON is not asked
set -u

# suits INTERPRETER [VERSION]: it runs (a pyenv shim may not), has venv and pip, and is of a good version.
suits() {
    command -v "$1" >/dev/null 2>&1 && "$1" - "${2:-}" >/dev/null 2>&1 <<'PY'
import sys
import ensurepip, venv
version = "%d.%d" % sys.version_info[:2]
sys.exit(version != sys.argv[1] if sys.argv[1] else sys.version_info < (3, 12))
PY
}

found() {
    command -v "$1"
    exit 0
}

# under_pyenv VERSION: the newest patch release of it that suits.
under_pyenv() {
    root=${PYENV_ROOT:-${HOME:-/root}/.pyenv}/versions
    for name in $(ls "$root" 2>/dev/null | grep "^$1\.[0-9]*\$" | sort -t . -k 3,3nr); do
        if suits "$root/$name/bin/python" "$1"; then found "$root/$name/bin/python"; fi
    done
}

if [ $# -gt 0 ]; then
    if suits "python$1" "$1"; then found "python$1"; fi
    if suits python3 "$1"; then found python3; fi
    under_pyenv "$1"
    echo "No Python $1 with venv here." >&2
    exit 1
fi

if [ -n "${PYTHON:-}" ]; then
    if suits "$PYTHON"; then found "$PYTHON"; fi
    echo "PYTHON=$PYTHON does not run, has no venv, or is older than Python 3.12." >&2
    exit 1
fi
for version in 3.13 3.12; do
    if suits "python$version" "$version"; then found "python$version"; fi
    if suits python3 "$version"; then found python3; fi
done
under_pyenv 3.13
under_pyenv 3.12
if suits python3; then  # newer than what is tested
    echo "Neither Python 3.13 nor 3.12 here; going on with $(python3 --version), untested." >&2
    found python3
fi

cat >&2 <<MESSAGE
seqmix needs Python 3.12 or newer with the venv module, and found none:
python3.13, python3.12 and python3 on the PATH, and ${PYENV_ROOT:-${HOME:-/root}/.pyenv}/versions.
Install one (Debian, Ubuntu: apt-get install python3 python3-venv; pyenv: pyenv install 3.13),
or name it: make PYTHON=/path/to/python3.13
MESSAGE
if command -v python3 >/dev/null 2>&1; then
    echo "python3 here is $(python3 --version 2>&1)." >&2
fi
exit 1
