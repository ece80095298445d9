"""What the host decides of a call on a GPU before anything is launched: family, kernel, source of keys, workspace. Runs without a GPU."""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path

import pytest

pytest.importorskip("dmattn._C", exc_type=ImportError)

from dmattn import plan

CALL = {"batch": 2, "heads": 4, "kv_heads": 2, "query_length": 300, "head_dim": 64, "is_causal": True}
ROOT = Path(__file__).parents[2]


def forward(device=None, **call):
    return plan.forward_plan({**CALL, **call}, device)


def backward(device=None, **call):
    return plan.backward_plan({**CALL, **call}, device)


def kernels(planned):
    return [(kernel["kernel"], kernel["size"], kernel["traits"]) for kernel in planned["kernels"]]


# The table of docs/support.md ----------------------------------------------------------------------------------------------------------

MASKS = {
    "none": {},
    "not causal": {"is_causal": False},
    "intervals of each head": {"interval_heads": 4},
    "intervals of each group": {"interval_heads": 2},
    "intervals of all heads": {"interval_heads": 1},
    "documents": {"interval_heads": 1, "is_in_order": True},
    "block": {"block_heads": 1},
    "block of each head": {"block_heads": 4},
    "block and intervals": {"block_heads": 1, "interval_heads": 4},
    "index": {"index_heads": 2},
    "index of blocks": {"index_heads": 2, "index_block": 64},
    "index of all heads, blocks and intervals": {"index_heads": 1, "index_block": 16, "block_heads": 1, "interval_heads": 4},
}
OPTIONS = [
    {"softcap": 5.0}, {"softcap": 400.0}, {"scale": -0.1}, {"dropout_p": 0.2}, {"key_bias_heads": 4}, {"key_bias_heads": 1}, {"bias_heads": 4},
]  # fmt: skip
SUBSETS = [{}, *OPTIONS, *({**one, **other} for one, other in itertools.combinations(OPTIONS, 2))]


def portable_lists(call):
    """What docs/support.md says of index lists: Hopper's kernels for them take no bias of single pairs, and no extreme scale or softcap."""
    return "index_heads" in call and ("bias_heads" in call or "scale" in call or call.get("softcap") == 400.0)


def portable_in_backward(call, deterministic):
    """What docs/support.md says of index lists, and of heads beyond 128 in a fixed order."""
    if "index_heads" in call and (portable_lists(call) or (deterministic and call["head_dim"] > 128)):
        return True
    adds_bias = "bias_heads" in call or "scale" in call or call.get("softcap") == 400.0
    gathers = "interval_heads" in call and "block_heads" not in call and not adds_bias
    shares_key_bias = call.get("key_bias_heads", 4) < 4
    return deterministic and call["head_dim"] > 128 and (gathers or shares_key_bias)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [8, 64, 72, 128, 136, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_families_are_those_of_the_table(mask, size, deterministic):
    for options in SUBSETS:
        call = {**MASKS[mask], **options, "head_dim": size, "deterministic": deterministic}
        assert forward(**call)["family"] == ("sm80" if portable_lists(call) else "sm90"), call
        assert backward(**call)["family"] == ("sm80" if portable_in_backward(call, deterministic) else "sm90"), call


def test_a_scale_beyond_the_softcap_is_the_table_s_last_row():
    call = {"scale": 1e15, "softcap": 1e-16}
    assert forward(**call)["family"] == "sm90"
    planned = backward(**call)
    assert planned["family"] == "sm80"
    assert planned["why_family"] == "the scale is more than 1e30 times the softcap"
    assert not planned["adds_zero_bias"]


@pytest.mark.parametrize("device", ["sm80", "sm86", "sm89", "sm100", "sm120"])
@pytest.mark.parametrize("mask", MASKS)
def test_other_devices_take_the_portable_kernels(mask, device):
    for options, deterministic in itertools.product(SUBSETS, (False, True)):
        call = {**MASKS[mask], **options, "deterministic": deterministic}
        for planned in (forward(plan.DEVICES[device], **call), backward(plan.DEVICES[device], **call)):
            assert planned["family"] == "sm80"
            assert planned["why_family"] == "the device is not of compute capability 9.x"
            assert all(kernel["kernel"].startswith("sm80") for kernel in planned["kernels"])


def test_every_row_of_the_table_is_still_what_these_tests_are_about():
    """A new row has to have its test here."""
    page = (ROOT / "docs/support.md").read_text()
    table = re.search(r"\| call, on compute capability 9\.0 .*?\n\n", page, re.S)
    assert table is not None
    rows = [line.split("|")[1:4] for line in table.group(0).strip().split("\n")[2:]]
    assert [("Hopper" in forward_column, "ortable" in backward_column) for _, forward_column, backward_column in rows] == [
        (True, False), (True, False), (True, False), (True, False), (True, True), (True, True), (True, False), (False, True), (True, True),
    ]  # fmt: skip


# Kernels ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, (64, "all/scaled/none")),
        ({"head_dim": 72}, (128, "all/scaled/none")),
        ({"head_dim": 64, "value_dim": 200}, (256, "all/scaled/none")),
        ({"block_heads": 1}, (64, "in order/scaled/none")),
        ({"interval_heads": 2}, (64, "gathered/scaled/key")),
        ({"interval_heads": 2, "is_in_order": True, "key_length": 2000}, (64, "in order/scaled/none")),
        ({"interval_heads": 2, "is_in_order": True, "query_length": 2000}, (64, "range/scaled/none")),
        ({"key_bias_heads": 2}, (64, "intervals/scaled/key")),
        ({"index_heads": 2}, (64, "union/scaled/key")),
        ({"index_heads": 2, "key_bias_heads": 2, "softcap": 5.0}, (64, "union/capped/key")),
        ({"key_bias_heads": 2, "head_dim": 256}, (256, "gathered/scaled/key")),
        ({"softcap": 5.0}, (64, "all/capped/none")),
        ({"softcap": 5.0, "block_heads": 1}, (64, "any/any/pair")),
        ({"softcap": 5.0, "interval_heads": 1}, (64, "gathered/capped/key")),
        ({"softcap": 400.0}, (64, "any/any/pair")),
        ({"scale": -0.1}, (64, "any/any/pair")),
        ({"bias_heads": 4}, (64, "all/dropout/copied")),
        ({"bias_heads": 4, "head_dim": 256}, (256, "any/any/pair")),
        ({"bias_heads": 4, "bias_dtype": "float32"}, (64, "any/any/pair")),
        ({"bias_heads": 4, "bias_shift": 4}, (64, "any/any/pair")),
        ({"bias_heads": 4, "interval_heads": 1}, (64, "any/any/pair")),
        ({"bias_heads": 4, "query_length": 304, "key_length": 307}, (64, "any/any/pair")),
        ({"bias_heads": 4, "query_length": 304, "key_length": 304}, (64, "all/dropout/copied")),
    ],
)
def test_kernels_of_forward_on_hopper(call, expected):
    # 304 keys: rows of a bias begin at multiples of 16 bytes
    assert kernels(forward(**{"query_length": 304, **call})) == [("sm90 forward", *expected)]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, (64, "in order/scaled/none")),
        ({"interval_heads": 2}, (64, "gathered/scaled/key")),
        ({"interval_heads": 2, "is_in_order": True}, (64, "in order/scaled/none")),
        ({"key_bias_heads": 2}, (64, "intervals/scaled/key")),
        ({"index_heads": 2}, (64, "union/scaled/key")),
        ({"index_heads": 2, "key_bias_heads": 2, "softcap": 5.0}, (64, "union/capped/key")),
        ({"key_bias_heads": 2, "block_heads": 1}, (64, "in order/capped/key")),
        ({"dropout_p": 0.1}, (64, "in order/capped/key")),
        ({"dropout_p": 0.1, "interval_heads": 2, "head_dim": 256}, (256, "gathered/capped/key")),
        ({"bias_heads": 1, "head_dim": 128}, (128, "in order/dropout/pair")),
        ({"bias_heads": 1, "softcap": 5.0}, (128, "in order/capped/pair")),
        ({"softcap": 400.0}, (128, "in order/capped/pair")),
        ({"scale": 0.0}, (64, "in order/dropout/pair")),
    ],
)
def test_kernels_of_backward_on_hopper(call, expected):
    assert kernels(backward(**call)) == [("sm90 backward", *expected)]


def test_portable_backward_runs_the_kernels_that_the_order_of_sums_needs():
    device = plan.DEVICES["sm80"]
    dkdv, dq = "sm80 backward dkdv", "sm80 backward dq"

    def ran(**call):
        return [kernel for kernel, _, _ in kernels(backward(device, **call))]

    assert ran() == [dkdv]
    assert ran(interval_heads=4) == [dq]
    assert ran(block_heads=1) == [dq]
    assert ran(deterministic=True) == [dkdv, dq]


# Where keys of a plan may come from, by the keys that its kernels take.
SERVED = {
    "all": {"all"}, "intervals": {"all"}, "range": {"range"}, "in order": {"all", "block table", "range"},
    "gathered": {"direct", "lists", "compact"}, "union": {"unions"}, "query lists": {"query lists"},
    "any": {"all", "block table", "lists", "unions"},
}  # fmt: skip


@pytest.mark.parametrize("device", ["sm80", "sm90"])
@pytest.mark.parametrize("mask", MASKS)
def test_kernels_take_the_keys_of_the_plan(mask, device):
    for options, deterministic, size in itertools.product(SUBSETS, (False, True), (64, 256)):
        call = {**MASKS[mask], **options, "deterministic": deterministic, "head_dim": size}
        for planned in (forward(plan.DEVICES[device], **call), backward(plan.DEVICES[device], **call)):
            for _, _, traits in kernels(planned):
                assert planned["keys"] in SERVED[traits.split("/")[0]], (call, planned)


def test_devices_with_less_shared_memory_have_smaller_tiles():
    tiles = [backward(plan.DEVICES[name], head_dim=256)["kernels"][0] for name in ("sm80", "sm86")]
    assert tiles[0]["keys"] > tiles[1]["keys"]


def test_backward_gathers_the_queries_that_list_blocks():
    lists = {
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "query_length": 4096,
        "index_heads": 8,
        "index_count": 16,
        "index_block": 64,
    }
    for device in ("sm90", "sm80", "sm86"):
        planned = backward(plan.DEVICES[device], **lists)
        assert planned["keys"] == "query lists"
        assert [traits for _, _, traits in kernels(planned)] == ["query lists/scaled/" + ("key" if device == "sm90" else "none")]
        other = ({"index_block": 1}, {"deterministic": True}, {"head_dim": 192}, {"block_heads": 1})
        assert {backward(plan.DEVICES[device], **lists | call)["keys"] for call in other} == {"unions"}
    assert backward(plan.DEVICES["sm80"], **lists, softcap=30.0)["keys"] == "unions"
    assert forward(**lists)["keys"] == "unions"


def test_unions_are_made_in_rounds_that_the_workspace_has_room_for():
    call = {"heads": 32, "kv_heads": 8, "head_dim": 128, "index_heads": 8, "index_count": 1024}
    long = forward(**call, query_length=32768)
    assert long["keys"] == "unions"
    assert 256 << 20 < long["workspace"]["bytes"] < 1 << 30
    # A union has at most all keys, so lists that are longer than the keys need no more.
    short = [forward(**{**call, "index_count": count}, query_length=512)["workspace"]["bytes"] for count in (512, 4096)]
    assert short[0] == short[1]


# Where keys come from -----------------------------------------------------------------------------------------------------------------


def sources_of(length, window, heads, *, queries=None, is_causal=True):
    """Of a dynamic mask: forward's and backward's."""
    call = {
        "batch": 1, "heads": heads, "kv_heads": heads, "query_length": queries or length, "key_length": length, "head_dim": 128,
        "interval_heads": heads, "key_bias_heads": heads, "most_keys": window, "is_causal": is_causal,
    }  # fmt: skip
    return forward(**call)["keys"], backward(**call)["keys"]


@pytest.mark.parametrize(
    ("length", "heads", "window", "expected"),
    [
        # Where nothing is known of the window.
        (256, 16, 0, ("direct", "lists")),
        (4096, 16, 0, ("lists", "lists")),
        (65536, 16, -1, ("lists", "lists")),
        # A small window.
        (4096, 16, 256, ("lists", "lists")),
        (65536, 16, 1024, ("lists", "lists")),
        # So few tiles that each processor has one at most.
        (1024, 16, 64, ("direct", "all")),
        (4096, 1, 64, ("lists", "all")),
        (4096, 1, 2048, ("direct", "all")),
        (16384, 1, 8192, ("lists", "lists")),
        # Half of all keys and more.
        (1000, 128, 500, ("all", "all")),
        (1024, 128, 512, ("all", "all")),
        (1024, 16, 768, ("all", "all")),
        (512, 16, 256, ("all", "all")),
        (4096, 16, 2048, ("lists", "all")),
        (4096, 16, 2600, ("all", "all")),
        (4096, 64, 2600, ("direct", "all")),
        (4096, 512, 2048, ("direct", "all")),
        (4096, 16, 3072, ("all", "all")),
        (16384, 16, 8192, ("lists", "lists")),
        (16384, 16, 12288, ("lists", "all")),
        (16384, 4, 12288, ("all", "lists")),
        (16384, 16, 14400, ("all", "all")),
        # All keys.
        (256, 16, 256, ("direct", "all")),
        (512, 16, 512, ("all", "all")),
        (4096, 512, 9999, ("all", "all")),
        (65536, 16, 65536, ("all", "all")),
        (65536, 1, 65536, ("all", "lists")),
    ],
)
def test_the_source_of_keys_that_is_chosen(length, heads, window, expected):
    assert sources_of(length, window, heads) == expected


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [1, 16, 512])
@pytest.mark.parametrize("length", [64, 512, 1000, 4096, 4097, 100_000, 1 << 20])
def test_a_larger_window_never_goes_back_to_lists(length, heads, is_causal):
    """The more keys a query sees, the less there is to save."""
    order = ("compact", "lists", "direct", "all")
    windows = sorted({max(1, length * share // 40) for share in range(1, 41)})
    chosen = [sources_of(length, window, heads, is_causal=is_causal) for window in windows]
    for each in zip(*chosen, strict=True):
        ranks = [order.index(name) for name in each]
        assert ranks == sorted(ranks)
    assert chosen[-1] == sources_of(length, length + 7, heads, is_causal=is_causal)


def test_only_pairs_that_causality_leaves_count():
    """The last queries of a long sequence see a small window of it, the first ones all they could see."""
    assert sources_of(8192, 6000, 64)[1] == "all"
    assert sources_of(8192, 6000, 64, queries=1000)[1] == "lists"
    assert sources_of(8192, 6000, 64, is_causal=False)[1] == "lists"
    assert sources_of(8192, 8000, 64, queries=1000)[1] == "all"


def test_sources_of_other_masks():
    long = {"query_length": 8192}
    assert forward(block_heads=1)["keys"] == backward(block_heads=1)["keys"] == "block table"
    assert forward()["keys"] == backward()["keys"] == "all"
    assert forward(**long, interval_heads=1, is_in_order=True)["keys"] == "range"
    assert forward(**long, interval_heads=1, is_in_order=True, head_dim=256)["keys"] == "lists"
    assert forward(**long, interval_heads=2, is_causal=False)["keys"] == "compact"
    assert forward(**long, interval_heads=4, is_causal=False)["keys"] == "lists", "heads of a group differ"
    assert backward(interval_heads=4)["keys"] == "lists"
    assert backward(interval_heads=2, bias_heads=2)["keys"] == "all"
    portable = {"interval_heads": 1, "is_in_order": True, "query_length": 8192}
    assert forward(plan.DEVICES["sm80"], **portable)["keys"] == backward(plan.DEVICES["sm80"], **portable)["keys"] == "lists"


# Workspaces ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["sm80", "sm90"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_workspace_is_its_regions(mask, device):
    """Side by side, aligned, none over another, and little between them."""
    for options, deterministic in itertools.product(SUBSETS, (False, True)):
        call = {**MASKS[mask], **options, "deterministic": deterministic, "query_length": 9000}
        for planned in (forward(plan.DEVICES[device], **call), backward(plan.DEVICES[device], **call)):
            workspace = planned["workspace"]
            end = 0
            for offset, size in sorted(workspace["regions"].values()):
                assert offset % 256 == 0
                assert 0 <= offset - end < 256
                end = offset + size
            assert 0 <= workspace["bytes"] - end < 256


def test_sizes_of_regions():
    call = {"batch": 1, "heads": 4, "kv_heads": 2, "query_length": 1000, "head_dim": 64, "dropout_p": 0.5, "deterministic": True}
    regions = {name: size for name, (_, size) in backward(**call)["workspace"]["regions"].items()}
    terms = 4 * 1024 * 4  # queries are padded to multiples of 128
    assert regions == {
        "query_sums": 4 * 1024 * 64 * 4, "lse2": terms, "delta": terms, "lse": terms, "lse_rest2": terms, "row_hash": terms,
        "flags": 8, "semaphores": 4 * 1024 // 32 * 4,
    }  # fmt: skip
    ranged = forward(query_length=8192, interval_heads=1, is_in_order=True, batch=1)["workspace"]["regions"]
    assert ranged == {"lists": (0, (2 * -(-8192 // 192) + 1) * 4)}


def test_sums_that_need_much_memory_are_added_up_in_parts():
    call = {"batch": 8, "heads": 64, "kv_heads": 8, "query_length": 65536, "head_dim": 128}
    assert backward(**call)["parts"] == (1, 4, 32)  # batches and kv heads of a part, query heads of a launch
    assert backward(**{**call, "heads": 32})["parts"] == (1, 8, 32)
    assert backward(**{**call, "query_length": 1024})["parts"] == (8, 8, 64)
    assert backward(**{**call, "interval_heads": 64, "deterministic": True})["parts"] == (1, 1, 1), "heads that differ are apart"


# Refusals -----------------------------------------------------------------------------------------------------------------------------


def test_a_call_without_queries_needs_no_kernel():
    assert forward(query_length=0, key_length=9)["family"] == "none"
    assert forward(batch=0)["family"] == backward(batch=0)["family"] == "none"
    assert backward(query_length=0, key_length=9)["family"] == "sm80"  # gradients of zero


def test_a_call_without_keys_is_taken_by_the_portable_kernels_whatever_is_wanted():
    planned = forward({"family": "sm90"}, key_length=0)
    assert (planned["family"], planned["why_family"]) == ("sm80", "there are no keys, so the result is zero")


@pytest.mark.parametrize("make", [forward, backward])
def test_refusals(make):
    with pytest.raises(RuntimeError, match=r"query: expected dtype bfloat16 or float16 on CUDA .*, got float32"):
        make(dtype="float32")
    with pytest.raises(RuntimeError, match="bits: expected tile sizes that are multiples of 128 on CUDA, got 64 x 64"):
        make(block_heads=1, block_size=64)
    with pytest.raises(
        RuntimeError, match="query, key: expected lengths up to 1048576 for a call that does not take its keys in order"
    ):
        make(query_length=(1 << 20) + 1)
    with pytest.raises(RuntimeError, match="DMATTN_FAMILY: expected auto, sm80 or sm90, got sm70"):
        make({"family": "sm70"})
    with pytest.raises(RuntimeError, match=r"DMATTN_FAMILY: sm90 needs a device of compute capability 9.x, this one has 8.x"):
        make({**plan.DEVICES["sm80"], "family": "sm90"})
    with pytest.raises(RuntimeError, match="DMATTN_FAMILY: expected auto or sm80, the kernels this build has, got sm90"):
        make({"family": "sm90", "has_sm90": False})


def test_long_calls_whose_keys_come_in_order_are_taken():
    call = {"batch": 1, "query_length": 1 << 22, "interval_heads": 1, "is_in_order": True}
    assert (forward(**call)["keys"], backward(**call)["keys"]) == ("range", "all")
    for make in (forward, backward):
        with pytest.raises(RuntimeError, match="query, key: expected lengths up to 1048576"):
            make({"family": "sm80"}, **call)


@pytest.mark.parametrize("make", [forward, backward])
def test_a_build_of_few_head_sizes_says_what_it_has(make):
    trimmed = {"sizes": [64]}
    assert {size for _, size, _ in kernels(make(trimmed))} == {64}
    with pytest.raises(
        RuntimeError, match="no kernel for head sizes D=128 and Dv=128; compiled: sm80 forward/bfloat16/64/in order/scaled/none, "
    ) as error:
        make(trimmed, head_dim=128)
    assert "/128/" not in str(error.value)
    assert make({"sizes": [64, 256]}, head_dim=128)["kernels"][0]["size"] == 256


def test_one_list_of_a_wide_kernel_has_sums():
    """Where a build lacks heads of 128, its kernel for 256 takes them, which adds up gradients of keys in memory."""
    call = {"interval_heads": 1, "head_dim": 128, "query_length": 600}
    assert "key_sums" not in backward(**call)["workspace"]["regions"]
    assert "key_sums" in backward({"sizes": [256]}, **call)["workspace"]["regions"]


def test_tensors_that_tensor_copies_do_not_take():
    for make in (forward, backward):
        planned = make(query_shift=8)
        expected = ("sm80", "tensor copies do not take the strides or addresses of the call")
        assert (planned["family"], planned["why_family"]) == expected
    with pytest.raises(
        RuntimeError, match=r"DMATTN_FAMILY: sm90 has no kernel for this call \(tensor copies do not take the strides"
    ):
        forward({"family": "sm90"}, query_shift=8)
    assert forward({"has_tensor_maps": False})["family"] == backward({"has_tensor_maps": False})["family"] == "sm80"


def test_more_tiles_than_have_numbers_are_refused():
    call = {"batch": 1 << 16, "heads": 1 << 15, "kv_heads": 1 << 15, "query_length": 1, "key_length": 1}
    assert forward(**call)["why_family"] == "the call has 2^31 tiles or more"
    assert backward(**call)["family"] == "sm90", "its sums need so much memory that it runs in parts"
    assert forward(**{**call, "batch": 1 << 15})["family"] == "sm90"


def test_families_that_are_wanted():
    assert forward({"family": "sm80"})["why_family"] == "DMATTN_FAMILY=sm80"
    assert forward({"family": "sm90"})["family"] == "sm90"
    assert forward({"has_sm90": False})["why_family"] == "this build has no kernels for Hopper"
    wide = {"head_dim": 256, "interval_heads": 1, "deterministic": True}
    assert backward({"family": "sm90"}, **wide)["family"] == "sm80", (
        "backward takes what Hopper's kernels do not take all the same"
    )


# Decoding -----------------------------------------------------------------------------------------------------------------------------

CACHE = {"batch": 1, "heads": 32, "kv_heads": 8, "key_length": 4096}


def decode(device=None, **call):
    return plan.decode_plan({**CACHE, **call}, device)


@pytest.mark.parametrize(
    ("call", "kernel", "cluster", "regions"),
    [
        ({}, "sm80 decode", True, set()),
        ({"takes_token": True}, "sm80 step", True, set()),
        ({"batch": 64}, "sm80 decode", False, set()),  # a block for each key head keeps the GPU busy
        ({"batch": 64, "takes_token": True}, "sm80 step", False, set()),
        ({"key_length": 131072}, "sm80 decode", False, {"part_out", "part_sums"}),
        ({"key_length": 131072, "takes_token": True}, "sm80 decode", False, {"part_out", "part_sums"}),
        ({"query_length": 0}, "none", False, set()),
    ],
)
def test_kernels_of_decoding(call, kernel, cluster, regions):
    planned = decode(**call)
    assert (planned["kernel"], planned["is_cluster"], set(planned["workspace"]["regions"])) == (kernel, cluster, regions)


@pytest.mark.parametrize("device", [{"family": "sm80"}, plan.DEVICES["sm80"], {"has_room_for_clusters": False}])
def test_decoding_without_clusters(device):
    planned = decode(device)
    assert not planned["is_cluster"]
    assert planned["parts"] > 1
    assert planned["workspace"]["regions"]["part_out"][1] == 32 * planned["parts"] * 128 * 4


def test_sums_of_decoding_do_not_depend_on_the_batch_and_the_device():
    for length, tokens in itertools.product((100, 4096, 40_000, 1 << 20), (1, 8)):
        calls = [decode(device, key_length=length, query_length=tokens, batch=batch)
                 for batch, device in itertools.product((1, 3, 64), plan.DEVICES.values())]  # fmt: skip
        assert len({planned["split_keys"] for planned in calls}) == 1
        for planned in calls:
            assert planned["block_splits"].bit_count() == 1
            assert planned["parts"] * planned["block_splits"] * planned["split_keys"] >= length


def test_decoding_with_lists():
    """A query of a list is a head; how much the cache holds does not matter."""
    plans = [
        decode(listed_keys=2048, key_length=length, query_length=queries)
        for length, queries in ((4096, 1), (1 << 20, 1), (4096, 2))
    ]
    assert plans[0] == plans[1]
    assert plans[0]["is_cluster"]
    assert plans[0] == decode(key_length=2048)
    assert plans[2] == decode(listed_keys=2048, kv_heads=16, heads=64)
    assert decode(listed_keys=2048, query_length=16)["rows"] == "few rows"
    assert decode(listed_keys=2048, list_heads=32, heads=32) == decode(key_length=2048, kv_heads=32)


def test_rows_of_decoding():
    assert [decode(query_length=tokens)["rows"] for tokens in (1, 4, 5)] == ["few rows", "few rows", "many rows"]
    assert not decode(query_length=5)["is_cluster"]


def test_decoding_that_no_kernel_takes():
    with pytest.raises(RuntimeError, match="query: expected dtype bfloat16 or float16 on CUDA"):
        decode(dtype="float32")
    with pytest.raises(
        RuntimeError, match="no kernel for head sizes D=128 and Dv=128; compiled: sm80 decode/bfloat16/64/few rows, "
    ):
        decode({"sizes": [64]})
    with pytest.raises(RuntimeError, match=r"query: expected B x H x T x splits below 2\^31"):
        decode(batch=1 << 20, query_length=64)


# Plans themselves ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_equal_calls_have_equal_plans(mask):
    for make, options in itertools.product((forward, backward), SUBSETS):
        call = {**MASKS[mask], **options}
        first = make(**call)
        make(head_dim=256, interval_heads=1, query_length=5000)  # another call between
        assert make(**call) == first


def test_plans_in_words(capsys):
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["plan", "--kv-heads", "8", "--window", "1024"])
    arguments.run(arguments)
    said = capsys.readouterr().out
    assert "forward: Hopper's kernels (sm90), because" in said
    assert "kernel     sm90 backward, gathered/scaled/key for heads up to 128: live keys gathered from lists; key_bias" in said
    assert "because few pairs are visible" in said
    arguments = parser.parse_args(["plan", "--decode", "--kv-heads", "8", "--length", "4096"])
    arguments.run(arguments)
    assert "kernel     sm80 decode, few rows, for heads up to 128" in capsys.readouterr().out
    arguments = parser.parse_args(["plan", "--device", "sm80", "--family", "sm90"])
    arguments.run(arguments)
    assert "backward: refused: dmattn: DMATTN_FAMILY: sm90 needs a device" in capsys.readouterr().out
    call = plan.described(parser.parse_args(["plan"]))
    assert [call[name] for name in ("batch", "heads", "kv_heads", "query_length", "head_dim")] == [1, 32, 32, 8192, 128]
