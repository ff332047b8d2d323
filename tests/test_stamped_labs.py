"""A stamped lab runs by itself, in the version that it was stamped with, and says what is wrong where it can't."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))

import stamp  # noqa: E402

FORK = stamp.Origin("someone/Fork", "c0ffee" * 6 + "c0ff", "https://someone.github.io/Fork")
LAB = "notebooks/02_the_gradient.ipynb"


def stamped(path: str = LAB) -> dict:
    return stamp.stamped(json.loads((ROOT / path).read_text(encoding="utf-8")), path, FORK)


def code(notebook: dict) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


# Runs cells in a process that knows of no clone: what is fetched from the one address is the archive.
RUN = """
import json, sys, urllib.request, warnings
archive, url, cells = json.load(sys.stdin)
def fetch(asked):
    assert asked == url, asked
    return archive, None
urllib.request.urlretrieve = fetch
import matplotlib
matplotlib.use("agg")
names = {}
for cell in cells:
    exec(cell, names)
import flce_ref
print("FROM", flce_ref.__file__)
"""


def run(cells: list[str], folder: Path, archive: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "TMPDIR": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
    }
    url = f"https://github.com/{FORK.repository}/archive/{FORK.revision}.tar.gz"
    given = json.dumps([str(archive), url, cells])
    return subprocess.run(
        [sys.executable, "-I", "-c", RUN], input=given, env=environment, cwd=folder, capture_output=True, text=True
    )


def test_a_stamped_lab_runs_with_the_library_that_it_fetched(tmp_path: Path) -> None:
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for part in ("flce_ref", "book/flce.mplstyle", LAB):
            tar.add(ROOT / part, arcname=f"Fork-{FORK.revision}/{part}")
    cells = code(stamped())
    ran = run([cells[0], *cells], tmp_path, archive)  # the first cell twice, as happens
    assert ran.returncode == 0, ran.stderr
    assert "flce_ref c0ffeec0ffee on CPU, PyTorch" in ran.stdout
    assert str(tmp_path / "flce-ref-c0ffeec0ffee" / "flce_ref") in ran.stdout.split("FROM")[1]


def test_nothing_is_installed() -> None:
    assert not re.search(r"\bpip\b(?! install --upgrade torch)|subprocess|^[!%]", stamp.INSTALL, re.MULTILINE)


TROUBLE = {
    "old PyTorch": (
        "import torch; torch.__version__ = '2.7.1+cu118'",
        r"PyTorch 2\.7\.1\+cu118 is here, 2\.8 or newer is needed.*Runtime version",
    ),
    "a revision that is gone": (
        "import urllib.error, urllib.request\n"
        "def gone(url): raise urllib.error.HTTPError(url, 404, 'Not Found', None, None)\n"
        "urllib.request.urlretrieve = gone",
        r"someone/Fork/archive/c0ffee\w+\.tar\.gz can't be had \(404\): open a newer version",
    ),
    "no network": (
        "import urllib.error, urllib.request\n"
        "def cut_off(url): raise urllib.error.URLError('no route to host')\n"
        "urllib.request.urlretrieve = cut_off",
        r"can't be reached from here: no route to host",
    ),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_what_is_missing_is_said(name: str, tmp_path: Path) -> None:
    before, said = TROUBLE[name]
    ran = run([before, code(stamped())[0]], tmp_path)
    assert ran.returncode == 1
    assert re.search(said, ran.stderr.splitlines()[-1])


@pytest.mark.parametrize("path", stamp.paths())
def test_every_notebook_is_stamped_and_none_is_in_the_repository(path: str) -> None:
    committed = (ROOT / path).read_text(encoding="utf-8")
    assert "colab.research" not in committed and "archive/" not in committed
    text = json.dumps(stamped(path))
    assert f"colab.research.google.com/github/someone/Fork/blob/labs/{FORK.revision}/{path}" in text
    assert stamped(path)["cells"][2:] != [] and len(stamped(path)["cells"]) == len(json.loads(committed)["cells"]) + 2
    relative = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("https://")]
    assert [link for link in relative if "/" in link] == []


def test_what_colab_opens_has_no_outputs(tmp_path: Path) -> None:
    arguments = ["--repository", FORK.repository, "--revision", FORK.revision, "--out", str(tmp_path)]
    assert stamp.main(arguments) == 0
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.ipynb"))
    assert written == sorted(stamp.paths())
    cells = json.loads((tmp_path / LAB).read_text(encoding="utf-8"))["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]] == []
    assert code({"cells": cells}) == code(stamped())


def test_links_lead_to_pages_or_files() -> None:
    assert FORK.page("book/05-fusing.md") == "https://someone.github.io/Fork/book/05-fusing.html"
    assert FORK.page("course/handouts/3_fused.md") == "https://someone.github.io/Fork/book/course-3-fused.html"
    assert FORK.page("README.md") == f"https://github.com/someone/Fork/blob/{FORK.revision}/README.md"
    cell = {"cell_type": "markdown", "source": ["[a](../book/05-fusing.md#one-factor), [b](https://x.org), [c](#d)\n"]}
    (line,) = stamp.stamped({"cells": [cell]}, LAB, FORK)["cells"][2]["source"]
    assert line == "[a](https://someone.github.io/Fork/book/05-fusing.html#one-factor), [b](https://x.org), [c](#d)\n"


@pytest.mark.parametrize(
    ("remote", "repository"),
    [
        ("https://github.com/owner/name.git", "owner/name"),
        ("https://github.com/owner/na.me", "owner/na.me"),
        ("git@github.com:owner/name.git", "owner/name"),
        ("ssh://git@github.com/owner/name", "owner/name"),
        ("https://example.org/owner/name.git", None),
        ("", None),
    ],
)
def test_the_repository_is_that_of_the_clone(
    monkeypatch: pytest.MonkeyPatch, remote: str, repository: str | None
) -> None:
    for variable in ("GITHUB_REPOSITORY", "GITHUB_SHA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(stamp, "_git", lambda *arguments: remote if arguments[0] == "remote" else "abc")
    where = stamp.origin()
    assert (where.repository if where else None) == repository
    assert where is None or (where.revision, where.pages) == (
        "abc",
        f"https://owner.github.io/{repository.split('/')[1]}",
    )  # type: ignore[union-attr]


def test_the_build_service_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "Someone/someone.github.io")
    monkeypatch.setenv("GITHUB_SHA", "def")
    assert stamp.origin() == stamp.Origin("Someone/someone.github.io", "def", "https://someone.github.io")


def test_a_page_has_a_button_only_if_the_repository_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = pytest.importorskip("docutils.nodes")
    utils = pytest.importorskip("docutils.utils")
    sys.path.insert(0, str(ROOT / "book" / "_ext"))
    stamped_labs = pytest.importorskip("stamped_labs", reason="needs Sphinx")
    app = SimpleNamespace(config=SimpleNamespace(html_baseurl=""), builder=SimpleNamespace(format="html"))
    starter = "course/starters/2_chunking.ipynb"
    for where, docname, opened in (
        (FORK, LAB[:-6], [LAB]),
        (FORK, "book/course-2-chunking", [starter]),
        (FORK, "book/05-fusing", []),
        (None, LAB[:-6], []),
    ):
        monkeypatch.setattr(stamp, "origin", lambda pages, where=where: where)
        page = utils.new_document("page")
        page += nodes.section("", nodes.title("", "Lab"), nodes.paragraph("", "text"))
        stamped_labs.add_button(app, page, docname)
        assert [node["refuri"] for node in page.findall(nodes.reference)] == [FORK.colab(path) for path in opened]
