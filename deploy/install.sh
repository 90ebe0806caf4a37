#!/bin/sh
# install.sh VENV EXTRAS [PYTHON]: installs Kaon into the virtual environment VENV, made first if it is not there, from
# PYTHON or the best one found. Called by the Makefile.
#
# A torch that this Python has (a ROCm or CUDA container's) is used, not replaced: VENV sees the folder it lies in, and
# its exact version takes the place of the pins in constraints.txt, so that pip would rather fail than bring another.
#
# All else is what deploy/locks names, checked by its hash. KAON_UNLOCKED=1 takes the newest versions that
# pyproject.toml admits instead; KAON_TORCH_LOCK=FILE names a lock of torch itself (docs/dependencies.md).
set -eu

venv=$1 extras=$2 candidates=${3:-python3 python3.13 python3.12 python3.11}
devices=${KAON_DEVICES:-/dev} # Where device files are; tests have others.
present_torch=$venv/present-torch.txt

# What a Python says of itself: rank|path|version|version of its torch|folder of its torch. Ranks: 0 is too old, 1 newer
# than tested, 2 as tested; 2 more where its torch can run Kaon. Has to parse on any Python.
probe='
import re, sys
version = sys.version_info[:2]
rank, torch, folder = 0, "", ""
if version >= (3, 11):
    from importlib import metadata
    rank = 2 if version <= (3, 13) else 1
    try:
        found = metadata.distribution("torch")
        torch, folder = found.version, str(found.locate_file(""))
        # 2.9.0a0, as some images have, is before 2.9 to pip.
        early = re.match(r"2\.9(\.0)?\.?(a|b|rc|dev)", torch)
        rank += 2 * (tuple(int(part) for part in torch.split(".")[:2]) >= (2, 9) and not early)
    except metadata.PackageNotFoundError:
        pass
print("|".join([str(rank), sys.executable, "%d.%d" % version, torch, folder]))
'

say() {
    echo "make: $*" >&2
}

make_venv() {
    best=$(for candidate in $candidates; do
        "$candidate" -c "$probe" 2>/dev/null || true
    done | sort -s -t '|' -k 1,1nr | head -n 1)
    IFS='|' read -r rank python version torch folder <<END
$best
END
    if [ "${rank:-0}" -eq 0 ]; then
        say "Kaon needs Python 3.11 or newer, and ${python:-none of $candidates} is ${version:-there}; install one," \
            "or name it: make PYTHON=/path/to/python3"
        return 1
    fi
    # Debian keeps what puts pip into a new environment in a package of its own; the Python's own pip does as well.
    "$python" -m venv --clear "$venv" >/dev/null 2>&1 ||
        { "$python" -m venv --clear --without-pip "$venv" &&
            "$python" -m pip --python "$venv/bin/python" install --quiet pip; } >/dev/null 2>&1 ||
        { say "$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" && return 1; }
    if [ "$rank" -ge 3 ]; then
        say "using torch $torch in $folder"
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "import site; site.addsitedir('$folder')" >"$site/present-torch.pth"
        echo "torch==$torch" >"$present_torch"
    elif [ -n "$torch" ]; then
        say "torch $torch in $folder is older than 2.9; $venv gets one of its own"
    fi
}

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv

if [ -f "$present_torch" ]; then
    { cat "$present_torch"; grep -v -e '^torch==' -e '^triton==' -e '^#' constraints.txt || true; } >"$venv/constraints.txt"
else
    cp constraints.txt "$venv/constraints.txt"
fi
say "installing Kaon into $venv (some minutes the first time, most of them for PyTorch)"
pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
}
install() {
    pip_install -c "$venv/constraints.txt" "$@"
}
isolation=
if [ -z "${KAON_UNLOCKED:-}" ]; then
    set -- -r deploy/locks/kaon.txt
    for extra in jwt otel test dev site fuzz ops; do
        case $extras in *$extra*) set -- "$@" -r "deploy/locks/$extra.txt" ;; esac
    done
    if [ -n "${KAON_TORCH_LOCK:-}" ] && [ ! -f "$present_torch" ]; then
        set -- "$@" -r "$KAON_TORCH_LOCK"
    fi
    pip_install --quiet --require-hashes --no-deps "$@" || {
        say "pip could not install what deploy/locks names, as it says above; where an index of your own serves other" \
            "files, KAON_UNLOCKED=1 make takes versions that pyproject.toml admits, without checking hashes"
        exit 1
    }
    # setuptools is among what was locked.
    isolation=--no-build-isolation
fi
# Only torch is missing now, and what its build brings.
install $isolation -e ".$extras"

# What the tests interpret kernels with, where torch has not brought it; by itself, as `.[interpreter]` would have
# Kaon built a second time.
interpreter='
import importlib.util, tomllib
if importlib.util.find_spec("triton") is None:
    with open("pyproject.toml", "rb") as file:
        print(*tomllib.load(file)["project"]["optional-dependencies"]["interpreter"])
'
case $extras in
*test*)
    triton=$("$venv/bin/python" -c "$interpreter")
    [ -z "$triton" ] || install "$triton"
    ;;
esac

# Where there are AMD's GPUs alone, what pip brings by itself would serve on the CPU.
hip='
import importlib.util, pathlib, runpy
folder = importlib.util.find_spec("torch").submodule_search_locations[0]
print(runpy.run_path(str(pathlib.Path(folder, "version.py")))["hip"] or "")
'
if [ -e "$devices/kfd" ] && [ ! -e "$devices/nvidiactl" ] && [ -z "$("$venv/bin/python" -c "$hip")" ]; then
    if [ -f "$present_torch" ]; then
        remedy="install a build for ROCm into that Python, or name another: make PYTHON=/path/to/python3"
    else
        remedy="set PIP_EXTRA_INDEX_URL to the index of ROCm builds that pytorch.org/get-started names"
    fi
    say "there is an AMD GPU ($devices/kfd), but torch is not built for ROCm: models run on the CPU. To use the GPU," \
        "$remedy; then rm -r $venv and make again"
fi
