#!/usr/bin/env bash
# Builds wheel and sdist, checks them, and trains with the wheel alone in an empty environment.
#
#   dev/package.sh VENV      VENV has `build` and `twine`
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "$1" && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

"$venv/bin/python" -m build -q --outdir "$out" . >/dev/null
"$venv/bin/twine" check --strict "$out"/*
wheel=$(ls "$out"/*.whl)
"$venv/bin/python" - "$wheel" "$out"/*.tar.gz <<'PY'
import sys
import tarfile
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
assert "jstep/py.typed" in names, "the wheel has no py.typed"
tests = [name for name in names if "test" in name.split("/")[0]]
assert not tests, f"the wheel holds tests: {tests[:3]}"
metadata = zipfile.ZipFile(sys.argv[1]).read(next(name for name in names if name.endswith("/METADATA"))).decode()
for field in ("Project-URL: Source", "License-Expression: Apache-2.0", "Author: ", "Description-Content-Type: text/markdown"):
    assert f"\n{field}" in metadata, f"the metadata has no {field}"
dead = [line for line in metadata.splitlines() if "](docs/" in line]
assert not dead, f"README's links are relative: {dead[:3]}"
packed = {name.partition("/")[2] for name in tarfile.open(sys.argv[2]).getnames()}
lacks = {"LICENSE", "README.md", "hatch_build.py"} - packed
assert not lacks, f"the sdist lacks {lacks}"
PY

python3 -m venv "$out/empty"
"$out/empty/bin/pip" install -q "$wheel"
"$out/empty/bin/jstep" >"$out/commands"
grep -q inspect "$out/commands"
cd "$out"  # outside of the checkout, so that the installed package is imported
"$out/empty/bin/python" - <<'PY'
import jax.numpy as jnp
import jstep

optimizer = jstep.adam(0.1)
state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
train_step = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), optimizer)
batches = jstep.batches(jnp.ones((8, 3)), batch_size=2)
state = jstep.train(train_step, state, batches, last_step=20, checkpoint_dir="run", progress=False)
assert jstep.global_step(state) == 20
assert jstep.latest_checkpoint("run").endswith("model-20")
PY
echo "the package builds, is complete, and trains without extras"
