#!/usr/bin/env bash
# Build the documentation as a site in build/docs/site, in a separate environment, and check every link. Needs neither torch nor a GPU.
#
#   bash tools/docs.sh            build and check
#   bash tools/docs.sh serve      build, check, and serve on http://127.0.0.1:8000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

env=.venv-docs
wanted="zensical==0.0.73 mkdocstrings[python]==1.0.8 numpy pyyaml rich psutil"
if [ "$(cat "$env/installed" 2>/dev/null)" != "$wanted" ]; then
    echo "[docs] installing $wanted into $env"
    rm -rf "$env"
    python3 -m venv "$env"
    # shellcheck disable=SC2086  # several words
    "$env/bin/pip" install --quiet --disable-pip-version-check $wanted
    echo "$wanted" > "$env/installed"
fi

"$env/bin/python" tools/docs.py gather
"$env/bin/zensical" build --clean --config-file build/docs/mkdocs.yml
"$env/bin/python" tools/docs.py check
if [ "${1:-}" = serve ]; then
    exec "$env/bin/python" -m http.server --bind 127.0.0.1 --directory build/docs/site 8000
fi
