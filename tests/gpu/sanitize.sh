#!/usr/bin/env bash
# The row kernels under compute-sanitizer of the CUDA toolkit: memory out of bounds, races in shared memory, memory read
# before it was written. Every allocation is made on its own, so that its borders are real ones. A few minutes.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
python=${PYTHON:-python3}
status=0
for tool in memcheck racecheck initcheck; do
    echo "== $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name-exclude kernel_substring=vectorized \
        "$python" benchmarks/kernel_check.py --sanitize || status=1
done
exit $status
