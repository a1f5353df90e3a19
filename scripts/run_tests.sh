#!/usr/bin/env bash
# Set-up, lint, types and the whole test suite (under 15 minutes on 2 cores). Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
ruff check .
ruff format --check .
codespell
mypy
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi
# Unit tests in two processes; the others start processes of their own.
python -m pytest tests/unit_tests -n 2 --dist loadfile
python -m pytest tests/distributed_tests tests/integration_tests
