#!/bin/sh
# make-venv.sh PYTHON FOLDER: make a virtual environment with pip, on a machine that may lack python3-venv.
set -eu
python=$1
folder=$2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is $("$python" --version 2>&1); loadstone needs Python 3.11 or newer (make PYTHON=python3.11 …)" >&2
    exit 1
}
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    # Debian and Ubuntu ship the standard library's venv as a package of its own.
    if [ "$(id -u)" = 0 ]; then as_root=""; else as_root="sudo -n"; fi
    echo "python3-venv is missing; installing it with apt-get"
    { $as_root apt-get update -qq && $as_root apt-get install -y -qq python3-venv; } >/dev/null || {
        echo "error: this Python has no venv module; run: sudo apt-get install python3-venv" >&2
        exit 1
    }
fi
"$python" -m venv "$folder"
