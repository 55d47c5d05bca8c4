#!/usr/bin/env bash
# On a GPU machine without network: make a virtual environment of the bundle's parts, this machine's own Python packages
# and this checkout, editable.
#
#   bash .gpu/install.sh [FOLDER]     default: ~/antkv-gpu
#
# Parts may come in several transfers: run this after each one. Exit status 3 says that parts are still missing.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:-$HOME/antkv-gpu}"
python="$folder/venv/bin/python"
mkdir -p "$folder/parts"

# Kept apart from the transfers, which may replace the folder they came in.
for part in "$here"/part-*; do
    if [ -e "$part" ]; then cp "$part" "$folder/parts/"; fi
done
cp "$here/SHA256SUMS" "$folder/parts/"
cd "$folder/parts"
if ! sha256sum --check --status SHA256SUMS 2>/dev/null; then
    echo "Parts are missing or not of this build (run this again once they are here):"
    sha256sum --check SHA256SUMS 2>/dev/null | grep -v ': OK$' || true
    exit 3
fi

if ! cmp --silent SHA256SUMS "$folder/installed"; then
    rm -rf "$folder/venv" "$folder/wheels"
    python3 -m venv --without-pip "$folder/venv"
    site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # The packages that this machine has come after those of the bundle.
    python3 -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >"$site/machine.pth"
    cut -c 67- SHA256SUMS | xargs cat >"$folder/bundle.tar.xz"
    python3 -m tarfile --filter data --extract "$folder/bundle.tar.xz" "$folder/wheels"
    "$python" -m pip install --disable-pip-version-check --quiet --no-index --no-deps --no-compile --ignore-installed \
        "$folder"/wheels/*.whl
    rm -rf "$folder/wheels" "$folder/bundle.tar.xz"
    "$python" -m compileall -q -j 0 "$site" || true
    cp SHA256SUMS "$folder/installed"
fi
# No compiler: what it would build runs on CPUs.
CXX=false "$python" -m pip install --disable-pip-version-check --quiet --no-index --no-deps --no-build-isolation \
    --editable "$(dirname "$here")"
echo "Ready: . .gpu/env.sh"
