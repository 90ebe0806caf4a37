#!/bin/sh
# container.sh [rocm | user]: installs Kaon where it lies, in a container that is being built, as root. A torch that the
# base image has is used. With `rocm` it must be built for that: pip's own would serve on the CPU. With `user`, Kaon is
# installed already, and only its user is made.
set -eu

make_user() {
    # Groups that own GPUs' device files have other numbers on each host: `docker run --group-add` names them.
    useradd --system --create-home --uid 10001 kaon
    install -d -o kaon /var/cache/kaon
}

# Symbols for debuggers are 19 MB of five packages; tests of packages, and bytecode of modules that serving does not import, are two fifths of what pip installs over torch.
# What is imported gets its bytecode by a first answer: the server's user could not write it.
trim() {
    find .venv -depth -type d -name __pycache__ -exec rm -r {} +
    for package in networkx numpy sympy; do
        for folder in .venv/lib/python3*/site-packages/"$package"; do
            [ ! -d "$folder" ] || find "$folder" -depth -type d -name tests -exec rm -r {} +
        done
    done
    for package in httptools regex uvloop xxhash yaml; do
        for folder in .venv/lib/python3*/site-packages/"$package"; do
            [ ! -d "$folder" ] || ! command -v strip >/dev/null ||
                find "$folder" -name '*.so' -exec strip --strip-debug {} +
        done
    done
    scratch=$(mktemp -d)
    body='{"model": "kaon-demo", "prompt": "Once", "max_tokens": 1}'
    echo "{\"custom_id\": \"1\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": $body}" >"$scratch/requests"
    # The variable is the installation's, and no setting of the server.
    env -u KAON_TORCH_LOCK .venv/bin/kaon run-batch "$scratch/requests" "$scratch/answers" --cpu-kvcache-gib 0.1 --device cpu
    # Bytecode goes by hashes of its sources: times differ in each build, and a builder may set them all to one.
    find "$PWD" -path '*/__pycache__/*.pyc' | sed 's|/__pycache__/\([^/]*\)\.cpython-[^/]*$|/\1.py|' | LC_ALL=C sort >"$scratch/sources"
    find "$PWD" -depth -type d -name __pycache__ -exec rm -r {} +
    # -f: what this Python itself imports at its start has bytecode that goes by times by then.
    PYTHONHASHSEED=0 .venv/bin/python -m compileall -f -q --invalidation-mode checked-hash -i "$scratch/sources"
    rm -r "$scratch"
}

if [ "${1:-}" = user ]; then
    make_user
    exit
fi

# The operators in C are compiled now, Triton's launchers when they are first used.
if ! { command -v make && command -v cc; } >/dev/null; then
    apt-get update
    apt-get install -y --no-install-recommends gcc libc6-dev make
    rm -rf /var/lib/apt/lists/*
fi
# With what tokens of identity providers and tracing need.
PIP_NO_CACHE_DIR=1 make install EXTRAS=[jwt,otel]

if [ "${1:-}" = rocm ] && ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.hip is None)'; then
    echo "container.sh: torch is not built for ROCm: name a base image, --build-arg ROCM_BASE=..., that has such a torch" \
        "of 2.9 or newer for Python 3.11 or newer" >&2
    exit 1
fi

trim
make_user
