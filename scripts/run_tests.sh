#!/usr/bin/env bash
# Set-up, lint, types and the whole test suite (under 15 minutes on 2 cores). Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
ruff check .
ruff format --check .
codespell
mypy
python -m pytest "$@"
