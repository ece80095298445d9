"""What a file of results or of training runs must be like to be read: for each field what it is, and which fields a row must have."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

MOST = 1e30  # of any number; statistics of larger ones would overflow
MOST_COUNT = 1 << 53


def is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and -MOST < x < MOST


def is_positive(x: Any) -> bool:
    return is_number(x) and bool(x > 1 / MOST)


def is_count(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < MOST_COUNT


def is_text(x: object) -> bool:
    return isinstance(x, str) and x.isprintable()


def is_word(x: object) -> bool:
    return isinstance(x, str) and re.fullmatch(r"[\w-]+", x) is not None


def each(holds: Callable[[Any], bool], kind: type = dict) -> Callable[[Any], bool]:
    """Whether it is an object, or a list, whose values all are so."""

    def holds_for_each(x: Any) -> bool:
        values: Any = x.values() if isinstance(x, dict) else x
        return isinstance(x, kind) and all(holds(value) for value in values)

    return holds_for_each


def is_ceiling(x: object) -> bool:
    return isinstance(x, dict) and all(is_positive(x.get(name)) for name in ("tflops", "gigabytes_per_second"))


def is_point(x: Any) -> bool:
    return each(is_number)(x) and {"step", "seconds"} <= x.keys() and bool({"held_bits", "held_accuracy"} & x.keys())


def is_object_of_times(x: object) -> bool:
    return isinstance(x, dict) and all(is_positive(value) for name, value in x.items() if name.endswith("_ms"))


Form = tuple[str, Callable[[Any], bool]]
ANY: Form = ("anything", lambda x: True)
OBJECT: Form = ("an object", lambda x: isinstance(x, dict))
NUMBER: Form = ("a number", is_number)
POSITIVE: Form = ("a number > 0", is_positive)
COUNT: Form = ("an integer >= 0", is_count)
SIZE: Form = ("an integer > 0", lambda x: is_count(x) and x > 0)
TEXT: Form = ("a line of text", is_text)
WORD: Form = ("a word", is_word)
FLAG: Form = ("true or false", lambda x: isinstance(x, bool))
NUMBERS: Form = ("an object of numbers", each(is_number))
TIMES: Form = ("an object of numbers > 0", each(is_positive))
TEXTS: Form = ("an object of texts", each(is_text))
LISTS: Form = ("an object of lists", each(lambda x: isinstance(x, list)))  # each sample is looked at as a measurement
MILLISECONDS: Form = ("an object whose times are numbers > 0", is_object_of_times)


def or_none(form: Form) -> Form:
    return f"{form[0]} or null", lambda x: x is None or form[1](x)


def fields(form: Form, names: str) -> dict[str, Form]:
    return dict.fromkeys(names.split(), form)


HEADER: dict[str, Form] = {
    **fields(OBJECT, "machine clocks"),
    **fields(TEXT, "machine.name machine.gpu machine.cpu machine.driver torch commit date"),
    "cuda": or_none(TEXT),
    "ceiling": ("an object with tflops and gigabytes_per_second > 0 for each dtype", each(is_ceiling)),
    **fields(TEXTS, "clocks.before clocks.after"),
}
ROW: dict[str, Form] = {
    **fields(TEXT, "workload case name peer refused cannot_run"),
    **fields(WORD, "kind dtype scores"),
    **fields(SIZE, "length batch heads kv_heads head_dim queries keys context block ranks"),
    **fields(COUNT, "pairs dense_pairs documents local sink page_size"),
    **fields(FLAG, "is_causal has_bias"),
    "window": or_none(SIZE),
    "samples": ("lists, or a list of numbers > 0", lambda x: LISTS[1](x) or each(is_positive, list)(x)),
    "kernel_samples": LISTS,
    "peer_samples": ("an object of lists of numbers > 0", each(each(is_positive, list))),
    "peer_names": ("a list of texts", each(is_text, list)),
    **fields(TIMES, "medians kernel_medians peer_us"),
    **fields(NUMBERS, "peak_bytes extra_bytes"),
    **fields(NUMBERS, "tflops kernel_tflops percent_of_ceiling kernel_percent_of_ceiling"),
    **fields(POSITIVE, "us milliseconds density share forward backward dense_forward dense_backward"),
    **fields(POSITIVE, "forward_ms backward_ms torch_forward_ms torch_backward_ms"),
    "peak_gib": or_none(NUMBER),
    **fields(MILLISECONDS, "ours one_chunk_alone torch_context_parallel_cudnn"),
}
CASE_KINDS = ("dense", "dma", "sliding", "streaming", "documents", "tree", "blocks", "patches", "select")
# Rows that are told by what stands first must have the fields after it.
NEEDED: tuple[tuple[Callable[[dict[str, Any]], bool], str], ...] = (
    (lambda row: isinstance(row.get("samples"), dict), "case"),
    (lambda row: row.get("kind") in CASE_KINDS, "length batch heads kv_heads head_dim dtype window scores is_causal density"),
    (lambda row: row.get("kind") in CASE_KINDS and "samples" in row, "medians kernel_medians pairs tflops kernel_tflops"),
    (lambda row: "tflops" in row, "kind pairs kernel_tflops"),
    (lambda row: "us" in row, "case"),
    (lambda row: "us" in row and row.get("kind") == "decode", "length batch heads kv_heads queries page_size has_bias peer_us"),
    (lambda row: "us" in row and row.get("kind") == "step", "batch context keys"),
    (lambda row: "us" in row and row.get("kind") == "prefill", "keys"),
    (lambda row: "milliseconds" in row, "length ranks name tokens_per_second peak_gib"),
    (lambda row: "dense_forward" in row, "length heads window share forward backward dense_backward"),
    (lambda row: "forward_ms" in row, "case"),
    (lambda row: "ours" in row, "length ranks"),
)
RUN: dict[str, Form] = {
    "name": TEXT,
    "complete": FLAG,
    "settings": OBJECT,
    **fields(WORD, "settings.task settings.bias settings.score"),
    "settings.mask": (
        "dynamic, dense, sliding, streaming, query or gated",
        lambda x: x in ("dynamic", "dense", "sliding", "streaming", "query", "gated"),
    ),
    **fields(SIZE, "settings.length settings.visible settings.heads"),
    **fields(NUMBER, "settings.seed settings.steps settings.seconds settings.local settings.sink settings.plain_heads"),
    **fields(NUMBER, "settings.plain_local settings.teach_rows"),
    **fields(ANY, "settings.recency settings.recency_selects settings.dense_until settings.anneal_until settings.explore"),
    **fields(ANY, "settings.teach settings.noise settings.lookahead"),
    "curve": ("a list of points with step, seconds, and held_bits or held_accuracy", each(is_point, list)),
}
# Of runs, where they have them.
RUN_OPTIONAL: dict[str, Form] = {
    "tokens_per_second": POSITIVE,
    **fields(NUMBER, "settings.rope_share settings.lr settings.layers settings.width settings.pairs settings.symbols"),
}
NOTHING = object()


def found(given: dict[str, Any], name: str) -> Any:
    """The value of a field, whose name may have dots; NOTHING where there is none."""
    value: Any = given
    for part in name.split("."):
        value = value.get(part, NOTHING) if isinstance(value, dict) else NOTHING
    return value


def wrong(given: dict[str, Any], forms: dict[str, Form], needed: Container[str] = ()) -> str:
    """What is wrong with the first field that is not what it must be; empty if all are."""
    for name, (words, holds) in forms.items():
        value = found(given, name)
        if value is NOTHING and name in needed:
            return f"{words} as {name}, got none"
        if value is not NOTHING and not holds(value):
            return f"{words} as {name}, got {shortened(value)}"
    return ""


def shortened(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # of an integer with thousands of digits
        return "an integer of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}..."


def wrong_row(row: object) -> str:
    if not isinstance(row, dict):
        return f"an object, got {shortened(row)}"
    rate = {"tokens_per_second": POSITIVE if "milliseconds" in row else NUMBERS}
    return wrong(row, ROW | rate, {name for holds, names in NEEDED if holds(row) for name in names.split()})


def wrong_run(run: object) -> str:
    if not isinstance(run, dict):
        return f"an object, got {shortened(run)}"
    return wrong(run, RUN, RUN) or wrong(run, RUN_OPTIONAL)
