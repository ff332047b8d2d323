"""PyTorch's own chunked ``F.linear_cross_entropy`` (2.13 and later), put through the conformance suite.

    python benchmarks/verify_torch_native.py --out book/data/torch_native_verify.json

runs ``flce_ref.verify`` on each configuration of ``CONFIGURATIONS`` and writes every row, with the version of PyTorch,
the date and the machine. What fails is a finding, not an error of this script: the exit status is 0. Options that the
chunked path has no code for (label smoothing, other target dtypes) are computed by PyTorch from the full logits, with a
warning; their rows say what came out, not how.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_ref import verify

#: Name → arguments of LinearCrossEntropyOptions; None is ``options=None``, the path that holds all logits.
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "options=None": None,
    "LinearCrossEntropyOptions()": {},
    "LinearCrossEntropyOptions(allow_retain_graph=True)": {"allow_retain_graph": True},
    'LinearCrossEntropyOptions(acc_policy="accurate")': {"acc_policy": "accurate"},
}


class Native:
    """``F.linear_cross_entropy`` under one configuration, with the suite's calling shape."""

    def __init__(self, configuration: dict[str, Any] | None) -> None:
        self.configuration = configuration

    def __call__(
        self, input: Tensor, linear_weight: Tensor, target: Tensor, chunk_size: int | None = None, **options: Any
    ) -> Tensor:
        if self.configuration is None:
            if chunk_size is not None:
                raise TypeError("options=None has no chunk_size")
            return F.linear_cross_entropy(input, linear_weight, target, **options)
        chunking = {} if chunk_size is None else {"batch_chunk_size": chunk_size, "chunking_method": None}
        chosen = torch.nn.LinearCrossEntropyOptions(**self.configuration, **chunking)
        return F.linear_cross_entropy(input, linear_weight, target, options=chosen, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    if not hasattr(F, "linear_cross_entropy"):
        parser.error(f"F.linear_cross_entropy came with PyTorch 2.13, this is {torch.__version__}")

    runs = []
    for name, configuration in CONFIGURATIONS.items():
        report = verify(Native(configuration), args.device)
        print(name, report.summary, *(f"  failed: {row.id}: {row.reason}" for row in report.failed), sep="\n")
        runs.append({"configuration": name, "checks": report.to_dict()["checks"], "summary": report.summary})
    device = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else platform.machine()
    document = {
        "about": "torch.nn.functional.linear_cross_entropy held to flce_ref.verify",
        "command": f"python benchmarks/verify_torch_native.py --device {args.device} --out {args.out.as_posix()}",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{args.device} ({device})",
        "runs": runs,
    }
    args.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
