#!/usr/bin/env bash
# Install the oldest packages that pyproject.toml allows at run time, with today's test tools.
# Usage: oldest.sh ENVIRONMENT UV
set -euo pipefail
environment=$1 uv=$2
python3 -m venv "$environment"
"$uv" pip compile --quiet --resolution lowest-direct --python "$environment/bin/python" \
    --extra cli --extra compression --extra demo --extra otel --extra server \
    --output-file "$environment/oldest.txt" pyproject.toml
"$uv" pip install --quiet --python "$environment/bin/python" --constraint "$environment/oldest.txt" --editable '.[dev]'
