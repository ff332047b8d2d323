#!/usr/bin/env bash
# The CUDA C++ kernels under compute-sanitizer of the CUDA toolkit: accesses out of bounds, races in shared memory,
# memory read before it was written. Every allocation is made on its own, so that its borders are real ones.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
status=0
for tool in memcheck racecheck initcheck synccheck; do
    echo "== $tool"
    only=(--kernel-name kernel_substring=cross_entropy --kernel-name kernel_substring=merge_stats --kernel-name kernel_substring=write_grad)
    [[ $tool == initcheck ]] && only=()  # what PyTorch's own kernels initialise must be seen
    # cuda.bindings asks the driver for entry points that it may not have: those refusals are no errors of ours.
    [[ $tool == memcheck ]] && only+=(--report-api-errors no)
    timeout 120 compute-sanitizer --tool "$tool" --error-exitcode 9 "${only[@]}" \
        "${PYTHON:-python3}" benchmarks/kernel_check.py --sanitize 2>&1 | tail -15 || status=1
done
exit $status
