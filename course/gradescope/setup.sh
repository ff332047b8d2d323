#!/usr/bin/env bash
# Gradescope runs this once, as root, when the autograder is built. PyTorch comes without CUDA: grading needs no GPU.
set -euo pipefail
apt-get update
apt-get install --yes --no-install-recommends python3 python3-pip python3-venv
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  python3 -m venv /opt/grader
else # an image whose own Python is too old
  python3 -m pip install uv
  UV_PYTHON_INSTALL_DIR=/opt/python python3 -m uv venv --seed --python 3.12 /opt/grader
fi
/opt/grader/bin/python -m pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
  "torch>=2.8" numpy "triton>=3.4"
