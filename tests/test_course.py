"""The course kit: right solutions get all points, starters none, mistakes lose the points that name them, and nothing
that a submission does to the process it runs in gets it more."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import wrong_submissions

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="grading needs Linux")

from course import bundle, submission  # noqa: E402
from course.assignments import ASSIGNMENTS  # noqa: E402
from course.channel import HEADER_BYTES, Channel  # noqa: E402
from course.grade import grade, graded  # noqa: E402
from course.report import Graded  # noqa: E402
from course.sandbox import MIB, Ended, Failed, Limits, Sandbox  # noqa: E402

ROOT = Path(__file__).parent.parent
STARTERS = {number: next((ROOT / "course/starters").glob(f"{number}_*.ipynb")) for number in ASSIGNMENTS}
HANDOUTS = {number: next((ROOT / "course/handouts").glob(f"{number}_*.md")) for number in ASSIGNMENTS}
SOLUTIONS = wrong_submissions.SOLUTIONS


def lost(result: Graded) -> set[str]:
    return {mark.item.id for mark in result.marks if not mark.passed}


@pytest.fixture(scope="module")
def regrade() -> Iterator[Callable[[int, str], Graded]]:
    """Grades in one process for each assignment: for submissions that are wrong but mean no harm."""
    with ExitStack() as stack:
        started: dict[int, Sandbox] = {}

        def one(number: int, source: str) -> Graded:
            if number not in started:
                assignment = ASSIGNMENTS[number]
                sandbox = Sandbox("", assignment.modules, environment=dict(assignment.environment))
                started[number] = stack.enter_context(sandbox)
            started[number].submit(source)
            return graded(number, submission.Source(source), started[number])

        yield one


# ---------------------------------------------------------------- right, empty, wrong


@pytest.mark.parametrize("number", ASSIGNMENTS)
def test_the_reference_gets_all_points(number: int) -> None:
    if number == 4:
        pytest.importorskip("triton", reason="THE KERNEL ASSIGNMENT IS NOT TESTED: pip install triton (Linux only)")
    result = grade(number, SOLUTIONS[number])
    assert lost(result) == set()
    assert result.score == 100
    assert not [remark for remark in result.remarks if remark.startswith("For the marker")]


@pytest.mark.parametrize("number", ASSIGNMENTS)
def test_the_starter_gets_none_and_is_told_why(number: int, regrade: Callable[[int, str], Graded]) -> None:
    if number == 4:
        pytest.importorskip("triton")
    result = regrade(number, submission.read(STARTERS[number], ASSIGNMENTS[number].functions).text)
    assert result.score == 0
    assert all(mark.reasons for mark in result.marks)


@pytest.mark.parametrize("mistake", wrong_submissions.MISTAKES, ids=lambda m: f"{m.assignment}: {m.name}")
def test_a_mistake_costs_what_names_it(
    mistake: wrong_submissions.Mistake, regrade: Callable[[int, str], Graded]
) -> None:
    if mistake.assignment == 4:
        pytest.importorskip("triton")
    assert lost(regrade(mistake.assignment, mistake.source)) == mistake.lost


@pytest.mark.parametrize("name", wrong_submissions.IMPLEMENTATIONS)
def test_a_wrong_implementation_costs_what_names_it(name: str, regrade: Callable[[int, str], Graded]) -> None:
    result = regrade(3, wrong_submissions.implementation(name))
    assert lost(result) == wrong_submissions.IMPLEMENTATIONS[name]
    assert any("shifted by 1" in remark for remark in result.remarks) == (name == "ShiftsTarget")


DOES_NOTHING = {
    1: "log_sum_exp = softmax = lambda z: 0 * z\n"
    "token_losses = lambda z, y: 0.0 * y\n"
    "dlogits = dlogits_with_options = lambda z, y, *_, **__: 0 * z\n"
    "head = lambda x, w, y: (0.0, 0 * x, 0 * w)\n",
    2: "chunked_loss = checkpointed_loss = lambda x, w, y, **_: x.sum() + w.sum()\n"
    "kept_bytes = chunked_step_peak = checkpointed_step_peak = best_chunk_count = lambda **_: 0\n",
    3: "fused_linear_cross_entropy = lambda x, w, y, **_: x.sum() + w.sum()\n",
    4: "cross_entropy_ = lambda z, y, **_: z.zero_().sum(1).float()\n",
}


NO_NUMBERS = {
    1: "nan = float('nan')\nlog_sum_exp = lambda z: nan * z[:, 0]\nsoftmax = lambda z: nan * z\n"
    "token_losses = lambda z, y: nan * y\ndlogits = dlogits_with_options = lambda z, y, *_, **__: nan * z\n"
    "head = lambda x, w, y: (nan, nan * x, nan * w)\n",
    2: "chunked_loss = checkpointed_loss = lambda x, w, y, **_: x.sum() * float('nan') + w.sum()\n"
    "kept_bytes = chunked_step_peak = checkpointed_step_peak = best_chunk_count = lambda **_: float('nan')\n",
    3: "fused_linear_cross_entropy = lambda x, w, y, **_: (x.sum() + w.sum()) * float('nan')\n",
    4: "cross_entropy_ = lambda z, y, **_: z.fill_(float('nan')).sum(1).float()\n",
}


@pytest.mark.parametrize("number", DOES_NOTHING)
@pytest.mark.parametrize("sources", [DOES_NOTHING, NO_NUMBERS], ids=["does nothing", "no numbers"])
def test_functions_that_only_look_alive_get_nothing(
    number: int, sources: dict[int, str], regrade: Callable[[int, str], Graded]
) -> None:
    if number == 4:
        pytest.importorskip("triton")
    assert lost(regrade(number, sources[number])) == {item.id for item in ASSIGNMENTS[number].items}


# ---------------------------------------------------------------- what a submission may do to its process

OPTIONS = "    on_probability = 1 + 2"
HARM = {
    "endless loop": "    while True: pass\n",
    "exit": "    import os; os._exit(0)\n",
    "sys.exit": "    raise SystemExit(0)\n",
    "crash": "    import ctypes; ctypes.string_at(0)\n",
    "memory bomb": "    hoard = []\n    while True: hoard.append(np.ones(10**7))\n",
    "output flood": "    while True: print('x' * 10**6)\n",
    "another program": "    import os; os.execv('/bin/true', ['true'])\n",
    "closed pipes": "    import os; os.closerange(3, 64)\n",
    "garbage on every pipe": "    import os\n    for fd in range(3, 64):\n        try: os.write(fd, b'x' * 999)\n"
    "        except OSError: pass\n",
    "an answer of a gigabyte": "    return np.zeros((2**14, 2**13))\n",
    "an answer that is none": "    return 'right'\n",
    "an error that can't be told": "    class E(Exception):\n        def __str__(self): raise self\n    raise E\n",
}
SHORT = Limits(call_seconds=1.0, memory_bytes=256 * MIB)


@pytest.mark.parametrize("name", HARM)
def test_harm_in_one_function_costs_the_points_of_that_function(name: str, tmp_path: Path) -> None:
    source = SOLUTIONS[1].read_text(encoding="utf-8")
    assert source.count(OPTIONS) == 1
    path = tmp_path / "harm.py"
    path.write_text(source.replace(OPTIONS, HARM[name] + OPTIONS), encoding="utf-8")
    started = time.monotonic()
    assert lost(grade(1, path, SHORT)) == {"options"}
    assert time.monotonic() - started < 30


RIGHT_ANSWERS = '{"score": 100, "tests": [{"name": "all", "score": 100, "max_score": 100, "output": ""}]}'
AT_IMPORT = {
    "endless loop": "while True: pass",
    "exit": "import os; os._exit(0)",
    "sys.exit": "import sys; sys.exit(0)",
    "missing module": "import no_such_module",
    "syntax": "def head(",
    "not text": "\ud800",
    "nothing": "",
    "printed results": f"print('''{RIGHT_ANSWERS}''', flush=True)",
    "results when it ends": f"import atexit; atexit.register(print, '''{RIGHT_ANSWERS}''')",
    "patched comparisons": "import numpy as np; np.allclose = np.array_equal = np.isclose = lambda *a, **k: True\n"
    "import builtins; builtins.abs = builtins.max = lambda *a: 0",
    "the library's own answers": "import flce_ref",
    "a forged answer on every pipe": "import json, os, struct\n"
    "head = json.dumps({'score': 100, 'passed': True, 'functions': ['head'], 'arrays': []}).encode()\n"
    "for fd in range(3, 64):\n"
    "    try: os.write(fd, (struct.pack('<Q', len(head)) + head) * 20)\n"
    "    except OSError: pass",
    "a pickle": "import os, pickle\nfor fd in range(3, 64):\n"
    "    try: os.write(fd, pickle.dumps({'score': 100}))\n    except OSError: pass",
}


@pytest.mark.parametrize("name", AT_IMPORT)
def test_nothing_done_at_import_gets_a_point(name: str, tmp_path: Path) -> None:
    path = tmp_path / "attack.py"
    stubs = submission.read(STARTERS[1], ASSIGNMENTS[1].functions).text
    path.write_bytes(f"{AT_IMPORT[name]}\n{stubs}".encode("utf-8", "surrogatepass"))
    assert grade(1, path, SHORT).score == 0


def test_a_patched_torch_gets_no_point(regrade: Callable[[int, str], Graded]) -> None:
    patches = (
        "import torch, sys\n"
        "torch.allclose = torch.equal = torch.isclose = lambda *a, **k: True\n"
        "torch.testing.assert_close = lambda *a, **k: None\n"
        "torch.Tensor.__sub__ = torch.Tensor.__rsub__ = lambda self, other: torch.zeros_like(self)\n"
        "torch.Tensor.abs = torch.Tensor.norm = lambda self, *a: torch.zeros(())\n"
        "class Agreeable(dict):\n"
        "    def __missing__(self, key): return self\n"
        "sys.modules['flce_ref'] = sys.modules['flce_ref.conformance'] = Agreeable()\n"
    )
    result = regrade(3, patches + DOES_NOTHING[3])
    assert result.score == 0


ESCAPES = {
    "fork": "os.fork()",
    "thread": "threading.Thread(target=print).start()",
    "subprocess": "subprocess.run(['true'])",
    "write a file": "f = open(path, 'w'); f.write('x' * 10**6); f.close()",
    "read the grader's environment": "open(f'/proc/{os.getppid()}/environ').read()",
    "more memory": "resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))",
    "more processes": "resource.setrlimit(resource.RLIMIT_NPROC, (99, 99))",
    "become root": "os.setuid(0)",
}
ONLY_AS_ROOT = {"read the grader's environment", "become root"}  # of another user there is nothing to fear then


def test_what_the_kernel_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_SECRET", "token")
    tmp_path.chmod(0o777)
    tried = "".join(f"    elif n == {i}: {code}\n" for i, code in enumerate(ESCAPES.values()))
    source = (
        f"import os, resource, subprocess, threading\npath = {str(tmp_path / 'x')!r}\n"
        f"def escape(n):\n    if n < 0: return float('GRADER_SECRET' in os.environ)\n{tried}    return 0.0\n"
    )
    with Sandbox(source) as sandbox:
        assert sandbox.ask("numbers", name="escape", options={"n": -1})[0][1] == 0
        for number, name in enumerate(ESCAPES):
            if name in ONLY_AS_ROOT and os.geteuid() != 0:
                continue
            with pytest.raises(Failed, match=r"Error|Operation not permitted"):
                sandbox.ask("numbers", name="escape", options={"n": number})
        assert sandbox.ask("numbers", name="escape", options={"n": 99})[0][1] == 0  # and it lives


def test_all_time_together_is_limited() -> None:
    with Sandbox("def f():\n    while True: pass\n", limits=Limits(call_seconds=0.3, total_seconds=1.0)) as sandbox:
        started = time.monotonic()
        for _ in range(6):
            with pytest.raises((Ended, Failed)):
                sandbox.ask("numbers", name="f", options={})
        assert time.monotonic() - started < 10
        with pytest.raises(Ended, match="All 1 seconds"):
            sandbox.ask("numbers", name="f", options={})


# ---------------------------------------------------------------- what comes through the pipe


def frame(header: object) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head


def described(dtype: object = "float32", shape: object = (1,), **more: object) -> dict[str, object]:
    return {"arrays": [{"dtype": dtype, "shape": shape}], **more}


NO_FRAMES = {
    "no JSON": frame(b"hello"),
    "no UTF-8": frame(b'"\xff"'),
    "no object": frame([1, 2]),
    "no arrays": frame({}),
    "deeply nested": frame(b"[" * 50_000),
    "a header without end": struct.pack("<Q", HEADER_BYTES + 1),
    "a number of many digits": frame(b'{"arrays": %s}' % (b"9" * 5000)),
    "an unknown dtype": frame(described("object")),
    "a dtype that is no name": frame(described(["float32"])),
    "too many dimensions": frame(described(shape=[1] * 99)),
    "a negative length": frame(described(shape=[-4])),
    "a length that is no number": frame(described(shape=[True])),
    "a length that is a fraction": frame(described(shape=[1.5])),
    "a shape that is none": frame(described(shape=3)),
    "too many bytes": frame(described(shape=[1000, 1000])),
    "too many arrays": frame({"arrays": described()["arrays"] * 99}),
}


def received(written: bytes, most_bytes: int = 1000) -> object:
    requests, replies = os.pipe(), os.pipe()
    os.write(replies[1], written)
    os.close(replies[1])
    channel = Channel(requests[1], replies[0], lambda: None)
    try:
        return channel.receive(most_bytes)
    finally:
        channel.close()
        os.close(requests[0])


@pytest.mark.parametrize("name", NO_FRAMES)
def test_what_is_no_frame_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no answer"):
        received(NO_FRAMES[name])


def test_a_frame_is_read_and_one_that_breaks_off_is_not() -> None:
    whole = frame(described(shape=[2], more=1)) + struct.pack("<2f", 1.5, 2.5)
    header, [(dtype, values)] = received(whole)  # type: ignore[misc]
    assert (header, dtype, values.tolist()) == ({"more": 1}, "float32", [1.5, 2.5])
    for length in (0, 5, 20, len(whole) - 1):
        with pytest.raises(EOFError):
            received(whole[:length])


# ---------------------------------------------------------------- what is handed in


def notebook(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]})


def test_of_a_notebook_the_definitions_are_run() -> None:
    text = notebook(
        "%matplotlib inline\nimport numpy as np\nimport no_such_module\nSCALE = 2.0\nprint('loud')",
        "!pip install torch\ndef helper(z):\n    return SCALE * np.exp(z)",
        "%%time\nsoftmax = None",
        "def softmax(z):\n    return helper(z)\nassert softmax(1) == 3",
        "this is no Python at all",
        "text = '''\n%kept\n'''\ndef head(): return text\nraise SystemExit",
    )
    source = submission.from_notebook(text, ("softmax", "head"))
    names: dict[str, object] = {}
    exec(source.text, names)
    assert names["softmax"](0.0) == 2.0  # type: ignore[operator]
    assert names["head"]() == "\n%kept\n"  # type: ignore[operator]
    assert {"print", "assert", "no_such_module", "SystemExit"}.isdisjoint(re.findall(r"\w+", source.text))
    told = "\n".join(source.remarks)
    for part in ("Code cell 1: not run, being for IPython: %matplotlib", "!pip", "%%time", "Code cell 5 was left out"):
        assert part in told
    line = source.text.splitlines().index("    return helper(z)") + 1
    assert source.place(line) == "code cell 4, line 2"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cells": 3}', '{"cells": [{"cell_type": "code"}]}', "\xff"])
def test_what_is_no_notebook_gets_nothing_and_is_told_so(content: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.ipynb"
    path.write_bytes(content.encode("latin-1"))
    result = grade(1, path)
    assert result.score == 0
    assert "FILE" in result.marks[0].reasons[0]


def test_what_a_marker_should_look_at_is_told() -> None:
    source = submission.Source("import sys\nfrom torch.nn import functional as F\nx = F.cross_entropy\n")
    names = {"cross_entropy": "why", "torch": "why", "modules": "why"}
    assert submission.mentions(source, names, ("functional", "jit")) == [
        "line 3 mentions cross_entropy: why",
        "line 2 mentions torch: why",
        "nothing mentions jit",
    ]


# ---------------------------------------------------------------- what the grader says


def command(*arguments: str | Path, cwd: Path = ROOT, module: str = "course.grade") -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    line = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


PEEK = """
import os
def peek():
    try:
        open(f"/proc/{os.getppid()}/mem", "rb").read(1)
        open(f"/proc/{os.getppid()}/environ", "rb").read(1)
    except OSError as error:
        return error.errno in (1, 5, 13)
if not peek():
"""


def test_the_archive_grades_by_itself_and_holds_no_solution(tmp_path: Path) -> None:
    archive = tmp_path / "grader.zip"
    assert bundle.main(["--assignment", "1", str(archive)]) == 0
    with zipfile.ZipFile(archive) as opened:
        names = opened.namelist()
        opened.extractall(tmp_path / "source")
    assert {"setup.sh", "run_autograder", "assignment", "course/grade.py", "flce_ref/functional.py"} <= set(names)
    assert not [name for name in names if "solution" in name or "starter" in name]
    # The grader's memory can't be read: else these would be the right answers.
    right = "".join(f"    {line}\n" for line in SOLUTIONS[1].read_text(encoding="utf-8").splitlines()[2:])
    stubs = submission.read(STARTERS[1], ASSIGNMENTS[1].functions).text
    path = tmp_path / "peek.py"
    path.write_text(stubs + PEEK + right, encoding="utf-8")
    run = command("--assignment", "1", path, "--json", cwd=tmp_path / "source")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["score"] == 0


def test_json_is_what_gradescope_reads(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    source = SOLUTIONS[1].read_text(encoding="utf-8").replace("gradient / counts.sum()", "gradient / len(y)")
    path.write_text(f"{source}\nprint('{{}}')\n", encoding="utf-8")
    run = command("--assignment", "1", path, "--json")
    assert (run.returncode, run.stderr) == (0, "")
    document = json.loads(run.stdout)
    assert set(document) == {"score", "output", "tests"}
    assert document["score"] == 90 == sum(test["score"] for test in document["tests"])
    assert sum(test["max_score"] for test in document["tests"]) == 100
    for test in document["tests"]:
        assert set(test) == {"name", "score", "max_score", "output"}
    (failed,) = (test for test in document["tests"] if not test["score"])
    assert failed["name"] == "what the mean divides by when tokens are ignored"
    for part in ("should be as without the ignored tokens", " is ", "and should be", "book/02-the-gradient.md"):
        assert part in failed["output"]


def test_the_report_can_be_read(regrade: Callable[[int, str], Graded]) -> None:
    text = str(regrade(1, SOLUTIONS[1].read_text(encoding="utf-8").replace("-= 1 - label_smoothing", "-= 1")))
    assert "+  10 of  10  log_sum_exp of each row" in text
    assert "-   0 of   5  label smoothing and z-loss" in text
    assert "95 of 100 points" in text
    assert "book/02-the-gradient.md, “Options: three numbers per row”" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    "arguments", [["--assignment", "5", "x.py"], ["x.py"], ["--assignment", "1"], ["--assignment", "1", "nowhere.py"]]
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from course.grade import main

    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


# ---------------------------------------------------------------- what students are given


@pytest.mark.parametrize("number", ASSIGNMENTS)
def test_the_handout_lists_what_is_graded(number: int) -> None:
    text = HANDOUTS[number].read_text(encoding="utf-8")
    listed = re.findall(r"^\| (.+?) \| (\d+) \|$", text, re.MULTILINE)
    assert listed == [(item.what, str(item.points)) for item in ASSIGNMENTS[number].items]
    assert ASSIGNMENTS[number].points == 100
    assert all(f"{name}(" in text for name in ASSIGNMENTS[number].functions)
    assert f"# Assignment {number}: {ASSIGNMENTS[number].title[0].lower()}{ASSIGNMENTS[number].title[1:]}" in text


@pytest.mark.parametrize("number", ASSIGNMENTS)
def test_every_pointer_leads_to_a_section_of_the_book(number: int) -> None:
    for item in ASSIGNMENTS[number].items:
        chapter = (ROOT / "book" / f"{item.chapter}.md").read_text(encoding="utf-8").replace("`", "")
        heading = rf"^(#+ {re.escape(item.section)}|\*\*{re.escape(item.section)}\*\*)$"
        assert re.search(heading, chapter, re.MULTILINE), f"{item.chapter}: {item.section}"


SELF_CHECKS = """
import json, sys
from pathlib import Path
for starter, solution in zip(sys.argv[1::2], sys.argv[2::2]):
    cells = json.loads(Path(starter).read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    stubs = [i for i, source in enumerate(sources) if "NotImplementedError" in source or "your code here" in source]
    names = {}
    exec(sources[0], names)
    exec(compile(Path(solution).read_text(), solution, "exec"), names)
    for source in sources[max(stubs) + 1:]:
        exec(source, names)
"""


def test_the_starters_own_checks_accept_the_reference() -> None:
    pytest.importorskip("triton")
    pairs = [str(path) for number in ASSIGNMENTS for path in (STARTERS[number], SOLUTIONS[number])]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", SELF_CHECKS, *pairs], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("all of it agrees with PyTorch") == 2


def test_the_course_is_neither_in_the_package_nor_its_solutions_in_the_book() -> None:
    tomllib, yaml = pytest.importorskip("tomllib"), pytest.importorskip("yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["flce_ref*"]
    excluded = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["exclude_patterns"]
    assert "course/**" in excluded
    for page in (ROOT / "book").glob("*.md"):
        assert "course/solutions/" not in page.read_text(encoding="utf-8").replace("`course/solutions/`", "")
