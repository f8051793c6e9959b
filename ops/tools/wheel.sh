#!/usr/bin/env bash
# Builds dist/quire-VERSION-py3-none-linux_x86_64.whl: the complete package with the compiled kernels of every level, so that
# a machine without a compiler is fast too, and the first start takes seconds.
#
#     ops/tools/wheel.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

"$python" kernels/cpu/build.py --all
libraries=$("$python" -c 'import sys; sys.path.insert(0, "kernels/cpu"); import build
for name in (build.COMMON, *build.LEVELS): print(build.find(name) or sys.exit(f"wheel: the kernels for {name} are not built"))')
tar --exclude=_build --exclude=__pycache__ -c src gateway worker shared kernels ops models pyproject.toml README.md LICENSE | tar -x -C "$tree"
mkdir "$tree/kernels/cpu/_build"
echo "$libraries" | xargs cp -t "$tree/kernels/cpu/_build"
sed -i 's|"cpu/\*.cpp", |"cpu/_build/*.so", &|' "$tree/pyproject.toml"
PIP_CONSTRAINT=$PWD/constraints.txt "$python" -m pip wheel --no-deps --wheel-dir dist --quiet --disable-pip-version-check \
  --config-settings=--build-option=--plat-name=linux_x86_64 "$tree"
ls -l dist/quire-*-linux_x86_64.whl
