#!/usr/bin/env bash
set -euo pipefail
export DEEPINFER_ACCELERATOR=nvidia
export DEEPINFER_JIT_CACHE_DIR=/var/cache/deepinfer
exec python launch.py "$1"
