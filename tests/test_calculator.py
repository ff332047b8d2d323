"""The book's calculator says what the library says, to the byte, and can be worked by keyboard and by link."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flce_ref import explain, linear_cross_entropy
from flce_ref.memory import simulate
from flce_ref.memory.head_step import HeadStep, longest_context
from flce_ref.memory.step_inputs import head_inputs

sys.path.insert(0, str(Path(__file__).parents[1] / "book" / "_ext"))
calculator_page = pytest.importorskip("calculator_page", reason="needs Sphinx")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OPTIONS: dict[str, dict[str, Any]] = {
    "naive": {"schedule": "naive"},
    "chunked": {"schedule": "chunked"},
    "checkpointed": {"schedule": "checkpointed"},
    "fused": {"schedule": "fused"},
    "fused-bf16": {"schedule": "fused", "accum_dtype": torch.bfloat16},
    "vocab_tiled": {"schedule": "vocab_tiled"},
}


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file = tmp_path_factory.mktemp("calculator") / "page.html"
    file.write_text(f"<!doctype html><title>t</title><body>{calculator_page.markup()}", encoding="utf-8")
    opened = browser.new_page()
    opened.goto(file.as_uri())
    yield opened
    opened.close()


def peaks(page: Any, heads: list[dict[str, Any]]) -> list[dict[str, int]]:
    """What the page computes for each head: step peak by schedule."""
    js = "heads => heads.map(h => Object.fromEntries(FlcePeaks.all(h, h.chunk).map(row => [row.id, row.peak])))"
    found: list[dict[str, int]] = page.evaluate(js, heads)
    return found


def head(n: int, v: int, d: int, dtype: str, chunk: int) -> dict[str, Any]:
    return {"n": n, "v": v, "d": d, "dtype": dtype, "bytes": DTYPES[dtype].itemsize, "chunk": chunk}


def options(id: str, chunk: int) -> dict[str, Any]:
    return OPTIONS[id] | ({"chunk_size": chunk} if chunk and id != "naive" else {})


def test_every_peak_is_that_of_the_library_to_the_byte(page: Any) -> None:
    sizes = [(201_088, 2880), (151_552, 2048), (128_256, 16_384), (262_208, 2560), (32_000, 64), (2, 1)]
    tokens, chunks = (1, 100, 4097, 8192, 131_072), (0, 1, 128, 1000, 4096, 10**7)
    heads = [head(n, v, d, t, c) for (v, d), n, t, c in itertools.product(sizes, tokens, DTYPES, chunks)]
    for one, found in zip(heads, peaks(page, heads), strict=True):
        expected = {
            id: explain(
                *head_inputs(one["n"], one["v"], one["d"], DTYPES[one["dtype"]]), **options(id, one["chunk"])
            ).step_peak_bytes
            for id in OPTIONS
            if id != "fused-bf16" or one["dtype"] == "bfloat16"
        }
        assert found == expected, one


@pytest.mark.parametrize("chunk", [0, 1024])
@pytest.mark.parametrize(("v", "d", "n"), [(151_552, 2048, 8192), (262_208, 2560, 5000)])
def test_every_peak_is_that_of_the_simulator_nearly(page: Any, v: int, d: int, n: int, chunk: int) -> None:
    (found,) = peaks(page, [head(n, v, d, "bfloat16", chunk)])
    assert found.keys() == OPTIONS.keys()
    for id, peak in found.items():
        step = partial(linear_cross_entropy, **options(id, chunk))
        assert peak == pytest.approx(simulate(step, *head_inputs(n, v, d), kernel="cuda").step_peak_bytes, rel=0.02), id


@pytest.mark.parametrize("id", ["naive", "fused", "vocab_tiled"])
def test_what_fits_is_what_the_library_says(page: Any, id: str) -> None:
    budget = 12 * 2**30
    one = head(1, 151_552, 2048, "bfloat16", 4096)
    found = page.evaluate(f"h => FlcePeaks.longest(h, h.chunk, '{id}', {budget})", one)
    chunk = None if id == "naive" else 4096
    assert found == pytest.approx(longest_context(HeadStep(id, 151_552, 2048, chunk_size=chunk), budget), rel=0.01)


def test_a_link_shows_the_same_to_whoever_follows_it(page: Any) -> None:
    page.get_by_label("Model").select_option("llama-3-8b")
    page.get_by_label("Context S, tokens").fill("8192")
    page.get_by_label("Dtype").select_option("float32")
    shared, said = page.url, page.locator("output").inner_text()
    assert "128,256 words: the logits alone take 3.91 GiB" in said
    assert shared.split("#")[1] == "model=llama-3-8b&context=8192&dtype=float32"
    page.get_by_role("button", name="Start again").click()
    assert "#" not in page.url and page.locator("output").inner_text() != said
    page.goto(shared)
    assert page.locator("output").inner_text() == said
    assert page.get_by_label("Vocabulary V").input_value() == "128256"
    page.goto(shared.split("#")[0] + "#v=5&d=3&gpu=nonsense&surprise=1")
    assert page.get_by_label("Model").input_value() == "" and page.locator("[name=gpu]").input_value() == "H100-80-GB"


def test_it_is_worked_by_keyboard_and_says_what_is_wrong(page: Any) -> None:
    page.goto(page.url.split("#")[0] + "#")
    page.locator("[name=model]").focus()
    page.keyboard.press("Tab")
    page.keyboard.type("30522")
    assert page.get_by_label("Model").input_value() == ""
    page.keyboard.press("Tab")
    page.keyboard.type("768")
    assert "30,522 words" in page.locator("output").inner_text()
    assert "--vocab 30522 --hidden 768" in page.locator(".same code").inner_text()
    page.keyboard.type("-")
    field = page.get_by_label("Hidden size D")
    field.fill("0")
    assert page.locator("output").inner_text() == "Hidden size D must be a whole number from 1 to 1,000,000."
    assert field.get_attribute("aria-invalid") == "true" and page.locator(".bars li").count() == 0
    field.fill("768")
    assert field.get_attribute("aria-invalid") is None and page.locator(".bars li").count() == 6


def test_the_bars_say_in_words_what_they_show(page: Any) -> None:
    page.goto(page.url.split("#")[0] + "#model=gravity-16b-a3b&gpu=H100-80-GB")
    rows = page.locator(".bars li").all_inner_texts()
    assert "naive" in rows[0] and "111.00 GiB" in rows[0] and "does not fit" in rows[0]
    assert "fused" in rows[3] and ": fits; up to" in rows[3]
    widths = page.eval_on_selector_all(".bars .peak", "bars => bars.map(bar => parseFloat(bar.style.width))")
    assert widths[0] == max(widths) > 90 and widths[3] < 5


def test_the_models_and_gpus_are_those_of_the_library_and_the_book() -> None:
    known = json.loads(json.dumps(calculator_page.data()))
    assert [model["id"] for model in known["models"]] == [model.id for model in calculator_page.MODELS]
    assert known["start"]["gpu"] in {gpu["id"] for gpu in known["gpus"]}
