"""Memory Viz files: real ones read, ours accepted by PyTorch's tools, hostile and damaged ones refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import pickletools
import re
import subprocess
import sys
import time
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_timeline import MIB, random_timeline, timelines
from torch.cuda import _memory_viz

from flce_ref.memory import Allocation, Frame, Timeline, name_by_size
from flce_ref.memory.caching_allocator import MIN_BLOCK, replay, round_block, segment_size
from flce_ref.memory.naming import category_of
from flce_ref.memory.snapshot import as_snapshot, read_timelines
from flce_ref.models import get

BOOK = Path(__file__).parents[1] / "book"
H200 = BOOK / "data/h200"
SHAPE = json.loads((H200 / "provenance.json").read_text())["shape"]
MEASURED = {
    row["name"]: row["peak_gib"]
    for row in json.loads((H200 / "peers-2026-12-01.json").read_text())
    if row["N"] == SHAPE["tokens"] and row["V"] == SHAPE["vocab_size"] and row.get("ign") == 0.0
}


def h200(name: str) -> Timeline:
    sizes = {key: SHAPE[key] for key in ("tokens", "vocab_size", "hidden_size")}
    return name_by_size(Timeline.from_snapshot(H200 / f"snap_{name}.pickle"), **sizes)


# ---------------------------------------------------------------- real files


@pytest.mark.parametrize(("name", "row"), [("naive", "naive"), ("chunked8", "chunked8"), ("flce", "proto2_C1024")])
def test_peaks_of_the_h200_snapshots_are_the_measured_ones(name: str, row: str) -> None:
    # max_memory_allocated counts blocks of 512 B, a snapshot requested bytes: they differ by some kB.
    assert h200(name).step_peak_bytes / 2**30 == pytest.approx(MEASURED[row], abs=1e-5)


def test_the_naive_step_is_named_from_its_stack_and_sizes() -> None:
    logits = SHAPE["tokens"] * SHAPE["vocab_size"] * 2
    assert h200("naive").alive_at_peak()[:4] == [
        ("dlogits", logits),
        ("gradient of the log-probabilities", logits),
        ("log-probabilities", logits),
        ("linear_weight", SHAPE["vocab_size"] * SHAPE["hidden_size"] * 2),
    ]


def test_the_chunked_step_keeps_every_chunks_log_probabilities_into_backward() -> None:
    timeline = h200("chunked8")
    kept = [a for a in timeline.alive_at(timeline.backward_start or 0) if a.category == "log-probabilities"]
    assert [a.label for a in kept] == [f"log-probabilities of chunk {k}" for k in range(1, 9)]
    assert dict(timeline.alive_at_peak())["dw"] == 3 * SHAPE["vocab_size"] * SHAPE["hidden_size"] * 2


def test_without_shapes_nothing_is_named_that_the_stack_does_not_say() -> None:
    timeline = Timeline.from_snapshot(H200 / "snap_flce.pickle")
    assert {a.label for a in timeline.allocations} == {"", "alive before recording"}
    assert any(frame.filename == "bench2.py" for a in timeline.allocations for frame in a.frames)


# ---------------------------------------------------------------- what the appendix "Reading Memory Viz" says of them


def test_the_four_buffers_of_the_recorded_step_are_found_by_size_and_three_are_the_spike() -> None:
    run = json.loads((H200 / "whole_step.json").read_text())
    step = Timeline.from_json((H200 / "whole_step_naive.json").read_text())
    logits = run["tokens"] * get(run["model"]).vocab_size * 2
    alike = [a for a in step.allocations if a.bytes == logits]
    assert [a.frames[0].name if a.frames else "" for a in alike] == ["plain_loss", "cross_entropy", "", ""]
    assert alike[1].frames[0].filename == "torch/nn/functional.py"
    assert [a in step.alive_at(step.peak_event) for a in alike] == [False, True, True, True]
    assert step.peak_bytes - step.live_bytes()[alike[0].start - 1] == 3 * logits


def test_the_program_on_the_page_prints_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (BOOK / "reading-memory-viz.md").read_text(encoding="utf-8")
    program, printed = re.findall(r"```python\n(from flce_ref[^`]*print[^`]*)```\n\n```text\n([^`]*)```", page)[0]
    monkeypatch.chdir(BOOK.parent)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(program, {})
    assert output.getvalue() == printed


# ---------------------------------------------------------------- files of other people's runs


def event(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": [], **more}


def freed(address: int, size: int) -> list[dict[str, Any]]:
    return [event("free_requested", address, size), event("free_completed", address, size)]


def block(size: int, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "state": state, "frames": [], **more}


def segment(address: int, *blocks: dict[str, Any], device: int = 0) -> dict[str, Any]:
    return {"device": device, "address": address, "total_size": sum(b["size"] for b in blocks), "blocks": list(blocks)}


def read(tmp_path: Path, snapshot: Any, device: int | None = None, protocol: int = 4) -> Timeline:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol=protocol))
    return Timeline.from_snapshot(path, device)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_blocks_older_than_the_recording_are_found_by_their_free_and_in_the_segments(
    tmp_path: Path, protocol: int
) -> None:
    snapshot = {
        "segments": [segment(0, block(512), block(1024, "inactive"), block(2048, "active_pending_free"))],
        "device_traces": [[*freed(512, 1024), event("alloc", 512, 700), *freed(512, 700)]],
    }
    timeline = read(tmp_path, snapshot, protocol=protocol)
    assert [(a.bytes, a.start, a.end) for a in timeline.allocations] == [
        (1024, 0, 1),
        (512, 0, None),
        (2048, 0, None),
        (700, 2, 3),
    ]
    assert timeline.input_bytes == 3584
    assert timeline.step_peak_bytes == 0
    assert timeline.notes == ("3 blocks (0.00 GiB) were allocated before the first recorded event",)


def test_devices_are_told_apart(tmp_path: Path) -> None:
    traces = [[], [event("alloc", 0, 512)], [event("alloc", 0, 1024), event("alloc", 4096, 512)], []]
    snapshot = {"segments": [segment(0, block(64), device=3)], "device_traces": traces}
    busiest = read(tmp_path, snapshot)
    assert (busiest.n_events, busiest.peak_bytes) == (2, 1536)
    assert busiest.notes == ("device 2; the file also holds device 1, 3",)
    assert read(tmp_path, snapshot, device=1).peak_bytes == 512
    assert read(tmp_path, snapshot, device=3).peak_bytes == 64
    with pytest.raises(ValueError, match="device: got 0, expected one of 1, 2, 3"):
        read(tmp_path, snapshot, device=0)
    every = read_timelines(tmp_path / "s.pickle")
    assert [t.title for t in every] == [f"s.pickle, device {k}" for k in (2, 1, 3)]


def test_an_out_of_memory_event_becomes_a_note(tmp_path: Path) -> None:
    trace = [event("alloc", 0, 512), event("oom", 0, 37 << 30, device_free=5 << 30)]
    notes = read(tmp_path, {"segments": [], "device_traces": [trace]}).notes
    assert notes == ("out of memory after event 1: 37.00 GiB requested, 5.00 GiB free on the device",)


def test_missing_frames_and_lost_frees_are_survived(tmp_path: Path) -> None:
    trace = [event("alloc", 0, 512), event("alloc", 0, 1024), *freed(0, 1024), event("segment_map", 0, 1 << 21)]
    for entry in trace:
        entry.pop("frames")
    timeline = read(tmp_path, {"device_traces": [trace]})
    assert [(a.bytes, a.start, a.end) for a in timeline.allocations] == [(512, 1, 2), (1024, 2, 3)]
    assert "not recorded" in timeline.notes[0]


def test_a_list_of_segments_alone_is_a_state_without_events(tmp_path: Path) -> None:
    timeline = read(tmp_path, [segment(0, block(512))])
    assert (timeline.n_events, timeline.peak_bytes) == (0, 512)


def test_what_fell_out_of_the_ring_buffer_counts_as_older_than_the_recording(tmp_path: Path) -> None:
    """torch keeps the last max_entries events: the allocations of early blocks are gone, their frees may remain."""
    everything = [event("alloc", 4096 * k, 1000 + k) for k in range(6)] + freed(0, 1000) + freed(4096, 1001)
    final = [segment(4096 * k, block(1000 + k)) for k in range(2, 6)]
    whole = read(tmp_path, {"segments": final, "device_traces": [everything]})
    cut = read(tmp_path, {"segments": final, "device_traces": [everything[4:]]})
    assert [a.bytes for a in cut.alive_at(0)] == [1000, 1001, 1002, 1003]
    assert cut.peak_bytes == whole.peak_bytes
    assert cut.live_bytes().tolist() == whole.live_bytes().tolist()[4:]
    assert cut.notes == ("4 blocks (0.00 GiB) were allocated before the first recorded event",)


def test_a_block_lives_until_its_free_is_completed(tmp_path: Path) -> None:
    """A tensor that another stream still reads (record_stream) is freed in two steps; the second may never come."""
    trace = [event("alloc", 0, 512), event("alloc", 512, 512), event("free_requested", 0, 512), *freed(512, 512)]
    pending = {"segments": [segment(0, block(512, "active_pending_free"))], "device_traces": [trace]}
    timeline = read(tmp_path, pending)
    assert [(a.start, a.end) for a in timeline.allocations] == [(1, None), (2, 3)]


def test_expandable_segments_and_events_without_memory_of_their_own_change_nothing(tmp_path: Path) -> None:
    """One segment that grows and shrinks by mapping; and what users and the tool itself put into the trace."""
    trace = [
        event("segment_map", 0, 1 << 21),
        event("alloc", 0, 4096),
        event("user_defined", 0, 0, user_metadata="step 3"),
        event("segment_map", 1 << 21, 1 << 21),
        event("alloc", 4096, 1 << 21),
        *freed(4096, 1 << 21),
        event("segment_unmap", 1 << 21, 1 << 21),
        event("segment_alloc", 1 << 30, 1 << 21),
        event("segment_free", 1 << 30, 1 << 21),
        event("snapshot", 0, 0),
    ]
    mapped = segment(0, block(4096), block((1 << 21) - 4096, "inactive")) | {"is_expandable": True}
    timeline = read(tmp_path, {"segments": [mapped], "device_traces": [trace]})
    assert [(a.bytes, a.start, a.end) for a in timeline.allocations] == [(4096, 1, None), (1 << 21, 2, 3)]
    assert timeline.n_events == 3


def test_many_segments_are_read_whether_or_not_they_say_where_their_blocks_lie(tmp_path: Path) -> None:
    """Blocks have addresses since torch 2.1; before, they follow one another."""
    old = [segment(1 << 20 | k << 30, block(512), block(512, "inactive"), block(1024 + k)) for k in range(50)]
    new = [
        s | {"blocks": [b | {"address": s["address"] + at} for b, at in zip(s["blocks"], (0, 512, 1024))]} for s in old
    ]
    trace = [event("alloc", 1 << 20 | 7 << 30, 512)]  # recorded, so it is no survivor
    for segments in (old, new):
        timeline = read(tmp_path, {"segments": segments, "device_traces": [trace]})
        assert timeline.n_events == 1
        assert timeline.peak_bytes == sum(512 + 1024 + k for k in range(50))
        assert len(timeline.alive_at(0)) == 99


def test_frames_in_cpp_are_dropped_where_python_has_some(tmp_path: Path) -> None:
    cpp, python = {"filename": "x.cpp", "line": 1, "name": "op"}, {"filename": "a.py", "line": 2, "name": "f"}
    trace = [event("alloc", 0, 1, frames=[cpp, python]), event("alloc", 512, 1, frames=[cpp])]
    both, only = read(tmp_path, {"device_traces": [trace]}).allocations
    assert both.frames == (Frame("a.py", 2, "f"),)
    assert only.frames == (Frame("x.cpp", 1, "op"),)


def test_labels_set_on_the_real_allocator_are_kept_and_sorted_into_categories(tmp_path: Path) -> None:
    trace = [event("alloc", 0, 1, user_metadata="dw accumulator"), event("alloc", 512, 1, user_metadata="step 7")]
    first, second = read(tmp_path, {"device_traces": [trace]}).allocations
    assert (first.label, first.category) == ("dw accumulator", "dw")
    assert (second.label, second.category) == ("step 7", "other")


@pytest.mark.parametrize(
    ("label", "category"),
    [
        ("logits of chunk 3", "logits"),
        ("dlogits", "dlogits"),
        ("log-probabilities of chunk 3", "log-probabilities"),
        ("weights", "other"),
        ("", "other"),
    ],
)
def test_a_label_names_its_category_by_whole_words(label: str, category: str) -> None:
    assert category_of(label) == category


def test_backward_begins_at_an_annotation_or_at_the_first_backward_frame(tmp_path: Path) -> None:
    inside = {"filename": "lib/torch/_tensor.py", "line": 1, "name": "backward"}
    trace = [event("alloc", 512 * k, 1, time_us=10 * k, frames=[inside] if k == 3 else []) for k in range(5)]
    snapshot: dict[str, Any] = {"device_traces": [trace]}
    assert read(tmp_path, snapshot).backward_start == 4
    notes = [{"stage": "START", "name": "## backward ##", "device": 0, "time_us": 15}]
    assert read(tmp_path, {**snapshot, "external_annotations": notes}).backward_start == 3
    assert read(tmp_path, {"device_traces": [trace[:2]]}).backward_start is None


# ---------------------------------------------------------------- files that are refused


def test_code_in_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    for protocol in range(2, 6):
        with pytest.raises(ValueError, match="refused: it names the Python object"):
            read(tmp_path, {"device_traces": [[Evil()]], "segments": []}, protocol=protocol)
    assert not (tmp_path / "ran").exists()


def stack_machine(*operations: bytes) -> bytes:
    """A pickle written by hand, of operations that Python's own pickler would not emit."""
    return b"\x80\x04" + b"".join(operations) + b"."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (stack_machine(b"cos\nsystem\n", b"X\x04\x00\x00\x00true", b"\x85R"), "posix.system|os.system"),
        (stack_machine(b"cbuiltins\neval\n", b"X\x03\x00\x00\x001+1", b"\x85R"), "builtins.eval"),
        (stack_machine(b"\x8c\x08builtins", b"\x8c\x07getattr", b"\x93"), "builtins.getattr"),
        (stack_machine(b"(", b"X\x01\x00\x00\x00x", b"ibuiltins\nexec\n"), "builtins.exec"),
        (stack_machine(b"(cbuiltins\nexec\nX\x01\x00\x00\x00xo"), "builtins.exec"),
        (stack_machine(b"cnumpy.core.multiarray\n_reconstruct\n"), "numpy.core.multiarray._reconstruct"),
        (stack_machine(b"ctorch._utils\n_rebuild_tensor_v2\n"), "torch._utils._rebuild_tensor_v2"),
        (stack_machine(b"Pstorage\n"), "objects outside the file"),
        (stack_machine(b"X\x01\x00\x00\x00s", b"Q"), "objects outside the file"),
    ],
)
def test_hostile_operations_are_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "hostile.pickle"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"hostile\.pickle: refused: it .*({message})"):
        Timeline.from_snapshot(path)


@pytest.mark.parametrize(
    "data",
    [
        stack_machine(b"\x82\x01"),  # an object by its number in the extension registry
        stack_machine(b"\x97"),  # a buffer outside the file
        stack_machine(b"}", b"}X\x01\x00\x00\x00aK\x01s", b"b"),  # a state set on a dict
        stack_machine(b"K\x01", b"K\x02", b"R"),  # a number called as a function
        stack_machine(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x0f"),  # 2⁶⁰ bytes that are not there
    ],
)
def test_other_operations_of_no_snapshot_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "hostile.pickle"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"hostile\.pickle: (truncated or damaged|refused)"):
        Timeline.from_snapshot(path)


@pytest.mark.parametrize(
    "snapshot",
    [
        {"device_traces": [[event("alloc", 0, -5)]]},
        {"device_traces": [[event("alloc", 0, 1 << 80)]]},
        {"device_traces": [[event("alloc", 0, "much")]]},
        {"device_traces": [[event("alloc", [], 1)]]},
        {"device_traces": [[event("alloc", 0, 1, frames="text")]]},
        {"device_traces": [[event("alloc", 0, 1, frames=[{"filename": "a.py"}])]]},
        {"device_traces": [["alloc"]]},
        {"device_traces": 5},
        {"segments": [{"device": None, "blocks": 3}]},
        {"segments": [segment(0, block(512))], "flce_ref": {"title": "no more than that"}},
        {"device_traces": [[event("alloc", 0, 1)]], "external_annotations": [None]},
    ],
)
def test_plain_values_that_make_no_snapshot_give_a_clear_error(tmp_path: Path, snapshot: Any) -> None:
    with pytest.raises(ValueError, match=r"s\.pickle: not as Memory Viz writes them"):
        read(tmp_path, snapshot)


@pytest.mark.parametrize("value", [torch.float32, torch.Size([1]), range(3), Path("x"), contextlib.suppress])
def test_anything_but_plain_values_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="refused"):
        read(tmp_path, {"device_traces": [[value]]})


def test_every_truncation_of_a_real_file_is_refused_clearly(tmp_path: Path) -> None:
    data = (H200 / "snap_naive.pickle").read_bytes()
    path = tmp_path / "cut.pickle"
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cut\.pickle: (truncated or damaged|not a pickle)"):
            Timeline.from_snapshot(path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all examples of a test: hypothesis makes no new tmp_path for each."""
    return tmp_path_factory.mktemp("scratch") / "s.pickle"


@given(position=st.integers(0, 4000), value=st.integers(0, 255))
def test_a_damaged_byte_gives_a_timeline_or_a_value_error(scratch: Path, position: int, value: int) -> None:
    data = bytearray((H200 / "snap_naive.pickle").read_bytes())
    data[position] = value
    scratch.write_bytes(data)
    with contextlib.suppress(ValueError):
        Timeline.from_snapshot(scratch)


def test_foreign_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "f"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", b"")
    contents = {
        "zip archive": buffer.getvalue(),
        "gzip": b"\x1f\x8b\x08\x00",
        "not a pickle": b"<!DOCTYPE html>",
        "has no 'segments' or 'device_traces'": pickle.dumps({"loss": 1.0}, protocol=4),
        "neither events nor memory": pickle.dumps({"segments": [], "device_traces": []}, protocol=4),
        "not as Memory Viz writes them": pickle.dumps({"segments": [], "device_traces": [[{"addr": 1}]]}, protocol=4),
    }
    for message, data in contents.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            Timeline.from_snapshot(path)
    with pytest.raises(OSError, match="No such file"):
        Timeline.from_snapshot(tmp_path / "absent")


# ---------------------------------------------------------------- files that we write


@given(timeline=timelines)
def test_what_is_written_is_read_back(scratch: Path, timeline: Timeline) -> None:
    timeline.to_snapshot(scratch)
    again = Timeline.from_snapshot(scratch)
    assert again.live_bytes().tolist() == timeline.live_bytes().tolist()
    assert sorted(again.allocations, key=repr) == sorted(timeline.allocations, key=repr)
    for name in ("title", "n_events", "backward_start", "source", "notes"):
        assert getattr(again, name) == getattr(timeline, name)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("written") / "w.pickle"
    h200("chunked8").to_snapshot(path)
    snapshot: dict[str, Any] = pickle.loads(path.read_bytes())
    return snapshot


def test_protocol_4_and_only_what_the_official_page_can_read(tmp_path: Path) -> None:
    random_timeline(3, 300).to_snapshot(tmp_path / "w")
    operations = list(pickletools.genops((tmp_path / "w").read_bytes()))
    assert operations[0][1] == 4
    # The opcodes that its JavaScript unpickler handles.
    known = set(
        """APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST
        EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS
        SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3""".split()  # noqa: SIM905
    )
    assert {operation.name for operation, _, _ in operations} <= known


def test_pytorchs_own_functions_accept_it(written: dict[str, Any]) -> None:
    def flamegraph(lines: str) -> str:
        return lines

    for function in (_memory_viz.segments, _memory_viz.memory):
        lines = function(written, format_flamegraph=flamegraph)
        assert "active_allocated" in lines
    after = _memory_viz.compare(written["segments"][:-1], written["segments"], format_flamegraph=flamegraph)
    assert after.startswith("only_after")
    timeline = h200("chunked8")
    segsum = _memory_viz.segsum(written)  # asserts every size
    reserved = timeline.estimated_reserved_bytes
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in segsum
    trace = _memory_viz.trace(written)
    assert trace.count("cudaMalloc") == sum(1 for s in replay(timeline).segments if s.event)
    assert trace.count("# free completed") == sum(a.end is not None for a in timeline.allocations)
    for page in (
        _memory_viz.trace_plot(written),
        _memory_viz.trace_plot(written, plot_segments=True),
        _memory_viz.segment_plot(written),
    ):
        assert "add_local_files" in page
    if not hasattr(_memory_viz, "filter_alloc_free_pairs"):  # torch 2.8
        return
    left = _memory_viz.filter_alloc_free_pairs(pickle.loads(pickle.dumps(written)))["device_traces"][0]
    survivors = sum(a.start > 0 and a.end is None for a in timeline.allocations)
    assert sum(entry["action"] == "alloc" for entry in left) == survivors


def test_pytorchs_command_line_accepts_it(tmp_path: Path) -> None:
    path = tmp_path / "w.pickle"
    h200("naive").to_snapshot(path)
    done = subprocess.run(
        [sys.executable, "-m", "torch.cuda._memory_viz", "stats", str(path)], capture_output=True, text=True, check=True
    )
    assert "total_reserved" in done.stdout


@given(timelines)
def test_some_category_is_unknown_and_every_event_lies_in_a_segment(timeline: Timeline) -> None:
    snapshot = as_snapshot(timeline)
    (trace,) = snapshot["device_traces"]
    # The official viewer throws where there are categories but no "unknown".
    assert "unknown" in {entry["category"] for entry in trace}
    known = [(s["address"], s["total_size"]) for s in snapshot["segments"]]
    announced = {entry["addr"] for entry in trace if entry["action"] == "segment_alloc"}
    seen = {address for address, _ in known} - announced
    for entry in trace:
        if entry["action"] == "segment_alloc":
            seen.add(entry["addr"])
        elif entry["action"] == "alloc":
            (home,) = [a for a, size in known if a <= entry["addr"] and entry["addr"] + entry["size"] <= a + size]
            assert home in seen  # a segment is announced before it is used


def test_a_hundred_thousand_events_with_deep_stacks_open_in_two_seconds(tmp_path: Path) -> None:
    """As a training run writes them: each event has a list of its own, of lines that all share."""
    lines = [{"filename": f"model{k % 9}.{'py' if k % 2 else 'cpp'}", "line": k, "name": f"f{k}"} for k in range(400)]
    trace = []
    for k in range(50_000):
        frames = [lines[(k % 97 + 7 * depth) % 400] for depth in range(40)]
        trace.append(event("alloc", k << 20, 512 * (1 + k % 50)) | {"frames": frames})
        trace.append(event("free_completed", k - 100 << 20, 512) | {"frames": frames})
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}, protocol=4))
    begun = time.process_time()
    page = Timeline.from_snapshot(path).to_html()
    assert time.process_time() - begun < 5  # one second on an idle machine; 7 where every stack is built anew
    assert len(page) < 3_000_000


def test_a_hundred_thousand_events_are_written_and_read_in_seconds(tmp_path: Path) -> None:
    timeline = random_timeline(1, 100_000, keep=2000)
    begun = time.perf_counter()
    timeline.to_snapshot(tmp_path / "w")
    again = Timeline.from_snapshot(tmp_path / "w")
    assert time.perf_counter() - begun < 30  # two seconds; quadratic would be minutes
    assert again.peak_bytes == timeline.peak_bytes


# ---------------------------------------------------------------- the model of the caching allocator


def test_sizes_of_blocks_and_segments() -> None:
    assert [round_block(n) for n in (0, 1, 512, 513)] == [512, 512, 512, 1024]
    sizes = [512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 21 * MIB]
    assert [segment_size(n) // MIB for n in sizes] == [2, 2, 20, 20, 10, 22]


def allocate(*rows: tuple[int, int, int | None]) -> Timeline:
    last = max(max(start, end or 0) for _, start, end in rows)
    return Timeline("", tuple(Allocation(*row) for row in rows), last, None, "simulated")


def test_small_requests_share_a_segment_and_a_freed_block_is_used_again() -> None:
    placed = replay(allocate((512, 1, 3), (512, 2, None), (512, 4, None)))
    first, second, third = placed.addresses
    assert (second - first, third) == (512, first)
    assert placed.peak_reserved_bytes == 2 * MIB


def test_the_best_fit_is_the_smallest_cached_block_that_holds_the_request() -> None:
    placed = replay(allocate((40 * MIB, 1, 4), (30 * MIB, 2, 5), (50 * MIB, 3, 6), (30 * MIB, 7, None)))
    assert placed.addresses[3] == placed.addresses[1]


def test_a_rest_of_at_most_a_mebibyte_is_not_split_off() -> None:
    not_split = replay(allocate((12 * MIB, 1, 2), (11 * MIB, 3, None), (512, 4, None)))
    assert [b.size for b in not_split.segments[0].blocks()] == [12 * MIB]
    split = replay(allocate((12 * MIB, 1, 2), (11 * MIB - 512, 3, None)))
    assert [b.size for b in split.segments[0].blocks()] == [11 * MIB - 512, MIB + 512]


def test_neighbours_merge_when_freed() -> None:
    # Three blocks of 4 MiB in one segment of 20; freed in the order first, last, middle, they are one again.
    placed = replay(allocate((4 * MIB, 1, 4), (4 * MIB, 2, 6), (4 * MIB, 3, 5), (20 * MIB - 512, 7, None)))
    assert len(placed.segments) == 1
    assert placed.addresses[3] == placed.addresses[0]


@given(timelines)
def test_blocks_tile_their_segments_and_never_overlap_in_time(timeline: Timeline) -> None:
    placed = replay(timeline)
    for s in placed.segments:
        blocks = s.blocks()
        assert sum(b.size for b in blocks) == s.size
        assert all(a.address + a.size == b.address for a, b in pairwise(blocks))
        assert all(a.owner is not None or b.owner is not None for a, b in pairwise(blocks))  # merged
    spans = [
        (address, address + round_block(a.bytes), a.start, timeline.n_events + 1 if a.end is None else a.end)
        for address, a in zip(placed.addresses, timeline.allocations)
    ]
    for i, (low, high, start, end) in enumerate(spans):
        assert low % MIN_BLOCK == 0
        for other_low, other_high, other_start, other_end in spans[:i]:
            assert high <= other_low or other_high <= low or end <= other_start or other_end <= start
    assert (placed.reserved_bytes >= timeline.live_bytes()).all()


def test_the_h200_needed_as_many_logits_sized_segments_as_the_model_says() -> None:
    size = SHAPE["tokens"] * SHAPE["vocab_size"] * 2
    with (H200 / "snap_naive.pickle").open("rb") as file:
        real = pickle.load(file)["segments"]
    modelled = replay(h200("naive")).segments
    assert sum(s.size == size for s in modelled) == sum(s["total_size"] == size for s in real) == 3


@pytest.mark.gpu
def test_the_model_reserves_what_the_real_allocator_reserves() -> None:
    """A fresh process replays a random timeline on the device; both hold the same bytes from CUDA, nearly throughout.

    Not quite: of free blocks of one size the one at the lowest address is taken, and the addresses are CUDA's choice.
    """
    script = (
        "import sys, json, torch\n"
        "events = json.load(sys.stdin)\n"
        "held, reserved = {}, []\n"
        "for frees, owner, size in events:\n"
        "    if frees: del held[owner]\n"
        "    else: held[owner] = torch.empty(size, dtype=torch.uint8, device='cuda')\n"
        "    reserved.append(torch.cuda.memory_reserved())\n"
        "print(json.dumps(reserved))\n"
    )
    from flce_ref.memory.caching_allocator import ordered_events

    for seed in range(3):
        timeline = random_timeline(seed, 2000)
        events = [(frees, owner, timeline.allocations[owner].bytes) for _, frees, owner in ordered_events(timeline)]
        done = subprocess.run(
            [sys.executable, "-c", script], input=json.dumps(events), capture_output=True, text=True, check=True
        )
        before = sum(1 for a in timeline.allocations if a.start == 0)
        real, model = np.array(json.loads(done.stdout)[before:]), replay(timeline).reserved_bytes[1:]
        np.testing.assert_allclose(model, real, rtol=0.03)
