"""How Lighthouse rates the built book on a phone: ``make lighthouse``, with npm and Chromium, on an idle machine.

Each page is opened several times, as times scatter; what is printed and kept, in ``book/data/lighthouse.json``, is the
median. The exit status is 1 if a score is below what the book promises.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from pages_server import served

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from flce_ref.benchmark import provenance  # noqa: E402

VERSION = "12.2.3"
PAGES = (
    "book/index",
    "book/02-the-gradient",
    "book/07-the-kernel",
    "notebooks/05_fusing",
    "book/calculator",
    "book/api",
)
PROMISED = 95
SCORES = ("performance", "accessibility")
SIZES = {
    "first-contentful-paint": "first paint, ms",
    "largest-contentful-paint": "largest paint, ms",
    "total-blocking-time": "blocked, ms",
    "cumulative-layout-shift": "layout shift",
    "total-byte-weight": "bytes",
}


def report(address: str, chromium: str) -> dict[str, Any]:
    """What Lighthouse says of one page, on its simulated phone and connection."""
    flags = "--headless=new --no-sandbox --disable-gpu --disable-background-networking"
    command = ["npx", "--yes", f"lighthouse@{VERSION}", address, "--quiet", "--output=json", f"--chrome-flags={flags}"]
    command.append(f"--only-categories={','.join(SCORES)}")
    done = subprocess.run(
        command, env=os.environ | {"CHROME_PATH": chromium}, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def median_of(reports: list[dict[str, Any]]) -> dict[str, float]:
    median = {name: statistics.median(100 * r["categories"][name]["score"] for r in reports) for name in SCORES}
    for audit, name in SIZES.items():
        median[name] = round(statistics.median(r["audits"][audit]["numericValue"] for r in reports), 3)
    return median


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="how often each page is opened (default: 3)")
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or shutil.which("npx") is None:
        print(f"lighthouse.py: needs {'chromium' if chromium is None else 'npx'}", file=sys.stderr)
        return 1
    pages = []
    with served(ROOT / "_build" / "html") as address:
        for page in PAGES:
            found = median_of([report(f"{address}/{page}.html", chromium) for _ in range(args.runs)])
            print(page, ", ".join(f"{name} {value:g}" for name, value in found.items()), flush=True)
            pages.append({"page": page.rpartition("/")[2], **found})
    about = provenance() | {"what": f"Pages rated by Lighthouse, median of {args.runs}", "command": "make lighthouse"}
    browser = subprocess.run([chromium, "--version"], capture_output=True, text=True).stdout.split()[1]
    about["versions"] |= {"lighthouse": VERSION, "chromium": browser}
    if args.out:
        document = {"provenance": about, "pages": pages}
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(page[score] < PROMISED for page in pages for score in SCORES))


if __name__ == "__main__":
    sys.exit(main())
