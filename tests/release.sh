#!/usr/bin/env bash
# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
#
# Builds in build/ what a release publishes, and checks it: the documentation as a
# site, with all links, and the packages, as twine and PyPI read them.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup_venv.sh
source launch/setup_venv.sh
setup_venv "$PWD" test docs || die "the install failed; its messages are above"
bin="$PWD/.venv/bin"

echo "=== site"
NO_MKDOCS_2_WARNING=1 "$bin/mkdocs" build --strict --quiet

echo "=== packages"
# From a copy, since a build writes into the folder that it builds.
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard \
  | tar --create --null --ignore-failed-read --files-from=- \
  | tar --extract --directory="$copy"
rm -rf build/packages
"$bin/python" -m build --outdir build/packages "$copy" >"$copy/build.log" 2>&1 \
  || { cat "$copy/build.log" >&2; die "the packages cannot be built"; }
"$bin/twine" check --strict build/packages/*
# The wheel is built from the source archive, which may lack files.
names="$("$bin/python" -m zipfile --list build/packages/*.whl)"
for name in tba_jax/configs/gsm8k/tba.py tba_jax/py.typed licenses/LICENSE \
  tba_jax/report/templates/report.html.j2
do
  grep -qF "$name " <<<"$names" || die "the wheel lacks $name"
done
