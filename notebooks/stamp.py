"""Stamp notebooks with the repository and revision that they belong to, so that a lone copy of one can be run.

    python notebooks/stamp.py --repository OWNER/NAME --revision SHA --out FOLDER

A stamped notebook begins with a badge that opens it on Colab, a link back to its page, and a cell that fetches the
library and the data of that revision. The committed notebooks have none of this: in a clone all of it is there.
The book's build publishes stamped labs (`book/_ext/stamped_labs.py`), and so does the branch that Colab reads
(`.github/workflows/labs.yml`).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "labs"  # of the repository: SHA/notebooks/….ipynb, stamped

# What is stamped, by its folder. A copy of a notebook finds its folder's neighbours under the same relative paths.
FOLDERS = ("notebooks", "course/starters")

INSTALL = """\
# Fetches this notebook's version of the library and its data. Nothing is installed: PyTorch and NumPy stay as they are.
import os, sys, tarfile, tempfile, urllib.error, urllib.request
from pathlib import Path

import torch

REPOSITORY, REVISION, FOLDER = "{repository}", "{revision}", "{folder}"
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
    raise RuntimeError(
        f"PyTorch {{torch.__version__}} is here, 2.8 or newer is needed. On Colab choose the latest under Runtime → "
        "Change runtime type → Runtime version; elsewhere: pip install --upgrade torch"
    )
root = Path(tempfile.gettempdir(), f"flce-ref-{{REVISION[:12]}}")
if not root.exists():
    url = f"https://github.com/{{REPOSITORY}}/archive/{{REVISION}}.tar.gz"
    try:
        archive, _ = urllib.request.urlretrieve(url)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{{url}} can't be had ({{error.code}}): open a newer version of this lab") from None
    except urllib.error.URLError as error:
        raise RuntimeError(f"{{url}} can't be reached from here: {{error.reason}}") from None
    with tarfile.open(archive) as opened:
        opened.extractall(f"{{root}}.part", filter="data")
    next(Path(f"{{root}}.part").iterdir()).rename(root)
sys.path[:0] = [str(root / FOLDER), str(root)]
os.environ["PYTHONPATH"] = str(root)  # for the processes that a lab starts
os.chdir(root / FOLDER)

from flce_ref.machine import this_machine, what_is_missing

print(f"flce_ref {{REVISION[:12]}} on {{this_machine().name}}, PyTorch {{torch.__version__}}")
for advice in what_is_missing():
    print(advice)
"""


@dataclass(frozen=True)
class Origin:
    """Where a notebook belongs: "OWNER/NAME" on GitHub, a commit, and the address of the book's pages."""

    repository: str
    revision: str
    pages: str

    def colab(self, path: str) -> str:
        """The address that opens the stamped copy of the notebook at `path` on Colab."""
        return f"https://colab.research.google.com/github/{self.repository}/blob/{BRANCH}/{self.revision}/{path}"

    def page(self, path: str) -> str:
        """The address of what is at `path` in the repository: its page if it has one, else the file on GitHub."""
        if handout := re.fullmatch(r"course/handouts/(\d)_(\w+)\.md", path):
            path = f"book/course-{handout[1]}-{handout[2]}.md"
        if re.fullmatch(r"(book/[\w-]+\.md|notebooks/[\w-]+\.ipynb)", path):
            return f"{self.pages}/{path.rpartition('.')[0]}.html"
        return f"https://github.com/{self.repository}/blob/{self.revision}/{path}"


def origin(repository: str | None = None, revision: str | None = None, pages: str | None = None) -> Origin | None:
    """What is given, else what the build service says, else what the clone says; None if it comes from no GitHub."""
    repository = repository or os.environ.get("GITHUB_REPOSITORY") or _github_name(_git("remote", "get-url", "origin"))
    revision = revision or os.environ.get("GITHUB_SHA") or _git("rev-parse", "HEAD")
    if not repository or not revision:
        return None
    owner, name = repository.split("/")
    host = f"{owner.lower()}.github.io"
    return Origin(repository, revision, (pages or f"https://{host}/{'' if name.lower() == host else name}").rstrip("/"))


def _github_name(remote: str) -> str:
    found = re.fullmatch(r"(?:https://|ssh://git@|git@)github\.com[/:]([\w.-]+/[\w.-]+?)(?:\.git)?/?", remote)
    return found[1] if found else ""


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()


def paths() -> list[str]:
    """Every notebook that is stamped, relative to the repository."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.ipynb"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def stamped(notebook: dict[str, Any], path: str, where: Origin) -> dict[str, Any]:
    """A copy of the notebook at `path` in the repository, two cells in front, links to its neighbours made absolute."""
    folder = path.rpartition("/")[0]
    page = where.page(path) if folder == "notebooks" else where.page("book/course.md")
    commit = f"https://github.com/{where.repository}/tree/{where.revision}"
    badge = f"[![Open on Colab](https://colab.research.google.com/assets/colab-badge.svg)]({where.colab(path)})"
    text = (
        f"{badge}\n\nFrom [the book]({page}), at revision [{where.revision[:12]}]({commit}). Run the next cell first."
    )
    code = INSTALL.format(repository=where.repository, revision=where.revision, folder=folder)
    result = copy.deepcopy(notebook)
    for cell in result["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = [_absolute_links(line, folder, where) for line in cell["source"]]
    result["cells"] = [
        {"cell_type": "markdown", "id": "stamp-1", "metadata": {}, "source": text.splitlines(keepends=True)},
        {
            "cell_type": "code", "id": "stamp-2", "metadata": {}, "execution_count": None, "outputs": [],
            "source": code.strip().splitlines(keepends=True),
        },
        *result["cells"],
    ]  # fmt: skip
    return result


def _absolute_links(line: str, folder: str, where: Origin) -> str:
    def absolute(found: re.Match[str]) -> str:
        return f"]({where.page(os.path.normpath(f'{folder}/{found[1]}'))}{found[2] or ''})"

    return re.sub(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)", absolute, line)


def write(out: Path, where: Origin) -> None:
    """Stamp every notebook into `out`, at the same relative path as in the repository, and without outputs: it is there
    to be run."""
    for path in paths():
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        notebook = json.loads((ROOT / path).read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell.update(outputs=[], execution_count=None)
        target.write_text(
            json.dumps(stamped(notebook, path, where), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repository", metavar="OWNER/NAME", help="by default that of the build service or the clone")
    parser.add_argument("--revision", metavar="SHA", help="likewise")
    parser.add_argument("--pages", metavar="URL", help="of the book; by default GitHub Pages of the repository")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    given = parser.parse_args(arguments)
    where = origin(given.repository, given.revision, given.pages)
    if where is None:
        parser.error("give --repository and --revision: this clone comes from no GitHub repository")
    write(given.out, where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
