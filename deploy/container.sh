#!/bin/sh
# Installs Kaon where it lies, in a container that is being built, as root. A torch that the base image has is used.
set -eu

# The operators in C are compiled now, Triton's launchers when they are first used.
if ! { command -v make && command -v cc; } >/dev/null; then
    apt-get update
    apt-get install -y --no-install-recommends gcc libc6-dev make
    rm -rf /var/lib/apt/lists/*
fi
PIP_NO_CACHE_DIR=1 make install

# Groups that own GPUs' device files have other numbers on each host: `docker run --group-add` names them.
useradd --system --create-home --uid 10001 kaon
install -d -o kaon /var/cache/kaon
