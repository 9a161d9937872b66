#!/bin/sh
# Install the library and all that its processes need into a new virtual environment, every download checked by
# its hash. The images are built by it; run it from the repository's root:
#   requirements/install.sh /opt/towpath
set -eu
prefix=$1
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
uv="$work/tools/bin/uv"
"$uv" pip install -q --python "$work/tools/bin/python" --require-hashes -r requirements/build.txt
"$uv" build -q --wheel --no-build-isolation --python "$work/tools/bin/python" --out-dir "$work/dist" .

"$python" -m venv --without-pip "$prefix"
# Compiled once, here: on a read-only file system every start, each health check too, would do it again.
"$uv" pip install -q --python "$prefix/bin/python" --link-mode copy --compile-bytecode --require-hashes \
	-r requirements/runtime.txt
"$uv" pip install -q --python "$prefix/bin/python" --no-deps --compile-bytecode "$work"/dist/towpath-*.whl
