#!/usr/bin/env bash
# Creates .venv with the pinned packages of requirements.txt; a second call returns at once.
# Sourced by quickstart.sh and run_tests.sh: afterwards the environment is active and the working folder is the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; set PYTHON=" >&2; exit 1; }
stamp=.venv/.installed-$(cat requirements.txt pyproject.toml | cksum | cut -d' ' -f1)
if [[ ! -f "$stamp" ]]; then
    echo "Setting up .venv (first run only) ..."
    "$PYTHON" -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
    .venv/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
    rm -f .venv/.installed-*
    touch "$stamp"
fi
source .venv/bin/activate
