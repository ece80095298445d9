# ruff: noqa: E501  (one case a line, however long)
"""Bad input: a public call says which argument, what was expected and what it got; a direct op call raises RuntimeError and never crashes."""

from __future__ import annotations

import re

import dmattn
import pytest
import torch
from dmattn import BlockMask, IndexMask, IntervalMask
from dmattn.nn import DynamicMaskAttention, IndexedAttention, ScoreRecipe, WindowSchedule, rotate, score_loss
from dmattn.testing import strategies
from strange import BLOCK, assert_taken_or_refused

NAN, INF = float("nan"), float("inf")


def rows(*size, dtype=torch.float32, seed=0):
    return strategies.random_tensor(size or (2, 4, 10, 16), seed, dtype)


Q, K, V = rows(), rows(2, 2, 12, 16), rows(2, 2, 12, 8)
K4, V4 = rows(2, 4, 12, 16), rows(2, 4, 12, 8)
S, FACTORS = rows(2, 2, 12), rows(2)
INTS = torch.zeros(12, dtype=torch.int32)


def attend(query=Q, key=K, value=V, mask=None, **options):
    return dmattn.attention(query, key, value, mask, **options)


def dma(scores=S, window=4, **options):
    return dmattn.dynamic_mask_attention(Q, K, V, scores, window, **options)


LENGTHS = torch.tensor([5, 12], dtype=torch.int32)
TABLE = torch.zeros(2, 1, dtype=torch.int32)
POOL, VALUE_POOL = rows(3, 16, 2, 16), rows(3, 16, 2, 8)


def decode(query=Q, key_cache=K, value_cache=V, lengths=LENGTHS, **options):
    return dmattn.decode_attention(query, key_cache, value_cache, lengths, **options)


def decode_pages(query=Q, key_cache=POOL, value_cache=VALUE_POOL, page_table=TABLE, **options):
    return decode(query, key_cache, value_cache, page_table=page_table, **options)


def sdpa(query=Q, key=K4, value=V4, attn_mask=None, **options):
    return dmattn.scaled_dot_product_attention(query, key, value, attn_mask, **options)


def flash_dma(a_coef=FACTORS, **options):
    query, key, value = (t.transpose(1, 2) for t in (Q, K, V))
    return dmattn.flash_dma_attention(query, key, value, rows(2, 16), a_coef, **options)


IQ, IK, IW = rows(2, 2, 10, 3, 8), rows(2, 2, 12, 8), rows(2, 2, 10, 3)  # of an indexer
QK = rows(2, 4, 10, 8), rows(2, 2, 12, 8)
PUBLIC = {
    # query, key, value
    "query is a list": (lambda: attend([[1.0]]), TypeError, "query: expected a torch.Tensor, got list"),
    "key is None": (lambda: attend(key=None), TypeError, "key: expected a torch.Tensor, got NoneType"),
    "value is a number": (lambda: attend(value=3), TypeError, "value: expected a torch.Tensor, got int"),
    "query of rank 3": (lambda: attend(Q[0]), ValueError, "query: expected 4 dimensions [B, H, Sq, D], got shape [4, 10, 16]"),
    "key of rank 5": (lambda: attend(key=K[None]), ValueError, "key: expected 4 dimensions [B, Hkv, Sk, D], got shape [1, 2, 2, 12, 16]"),
    "value of rank 2": (lambda: attend(value=V[0, 0]), ValueError, "value: expected 4 dimensions [B, Hkv, Sk, Dv], got shape [12, 8]"),
    "query of integers": (lambda: attend(Q.int()), TypeError, "query: expected dtype float64, float32, bfloat16, float16, got int32"),
    "query complex": (lambda: attend(Q.to(torch.complex64)), TypeError, "query: expected dtype float64, float32, bfloat16, float16, got complex64"),
    "key of another dtype": (lambda: attend(key=K.double()), TypeError, "key: expected dtype torch.float32 like query, got torch.float64"),
    "value of another dtype": (lambda: attend(value=V.half()), TypeError, "value: expected dtype torch.float32 like query, got torch.float16"),
    "key on another device": (lambda: attend(key=K.to("meta")), ValueError, "key: expected device cpu like query, got meta"),
    "value on another device": (lambda: attend(value=V.to("meta")), ValueError, "value: expected device cpu like query, got meta"),
    "heads do not divide": (lambda: attend(rows(2, 5, 10, 16)), ValueError, "key: expected a number of heads that divides H=5 of query, got Hkv=2"),
    "more key heads": (lambda: attend(Q[:, :1]), ValueError, "key: expected a number of heads that divides H=1 of query, got Hkv=2"),
    "no key heads": (lambda: attend(key=K[:, :0], value=V[:, :0]), ValueError, "key: expected a number of heads that divides H=4 of query, got Hkv=0"),
    "batches differ": (lambda: attend(key=K[:1]), ValueError, "key: expected [B, Hkv, Sk, D] with B=2, D=16, got [1, 2, 12, 16]"),
    "head sizes differ": (lambda: attend(key=K[..., :8]), ValueError, "key: expected [B, Hkv, Sk, D] with B=2, D=16, got [2, 2, 12, 8]"),
    "value of other length": (lambda: attend(value=V[:, :, 1:]), ValueError, "value: expected [B, Hkv, Sk, Dv] with B=2, Hkv=2, Sk=12, got [2, 2, 11, 8]"),
    "value of other heads": (lambda: attend(value=V[:, :1]), ValueError, "value: expected [B, Hkv, Sk, Dv] with B=2, Hkv=2, Sk=12, got [2, 1, 12, 8]"),
    "D not a multiple of 8": (lambda: attend(Q[..., :12], K[..., :12]), ValueError, "query: expected a last dimension that is a multiple of 8 up to 256, got 12"),
    "D over 256": (lambda: attend(rows(2, 4, 10, 264), rows(2, 2, 12, 264)), ValueError, "query: expected a last dimension that is a multiple of 8 up to 256, got 264"),
    "D of 0": (lambda: attend(Q[..., :0], K[..., :0]), ValueError, "query: expected a last dimension that is a multiple of 8 up to 256, got 0"),
    "Dv not a multiple of 8": (lambda: attend(value=V[..., :4]), ValueError, "value: expected a last dimension that is a multiple of 8 up to 256, got 4"),
    "too long": (lambda: attend(Q[:1, :1].expand(1, 1, 10, 16), K[:1, :1, :1].expand(1, 1, (1 << 20) + 1, 16), V[:1, :1, :1].expand(1, 1, (1 << 20) + 1, 8)), ValueError, "expected lengths up to 1048576, got Sq=10, Sk=1048577"),
    # mask
    "mask of floats": (lambda: attend(mask=torch.ones(10, 12)), TypeError, "mask: expected dtype bool, got float32; bias= takes what is added"),
    "mask of lists": (lambda: attend(mask=torch.zeros(10, 3).long()), TypeError, "mask: expected dtype bool, got int64; lists of keys are an IndexMask"),
    "mask is a list": (lambda: attend(mask=[[True]]), TypeError, "mask: expected an IntervalMask, a BlockMask, an IndexMask, an intersection of such or a bool tensor, got list"),
    "mask does not broadcast": (lambda: attend(mask=torch.ones(10, 11, dtype=torch.bool)), ValueError, "mask: expected [B|1, H|Hkv|1, Sq|1, Sk] with B=2, H=4, Hkv=2, Sq=10, Sk=12, got [10, 11]"),
    "mask of 3 heads": (lambda: attend(mask=torch.ones(3, 10, 12, dtype=torch.bool)), ValueError, "mask: expected [B|1, H|Hkv|1, Sq|1, Sk] with B=2, H=4, Hkv=2, Sq=10, Sk=12, got [3, 10, 12]"),
    "mask of rank 5": (lambda: attend(mask=torch.ones(1, 1, 1, 10, 12, dtype=torch.bool)), ValueError, "mask: expected [B|1, H|Hkv|1, Sq|1, Sk], got shape [1, 1, 1, 10, 12]"),
    "mask on another device": (lambda: attend(mask=torch.ones(10, 12, dtype=torch.bool, device="meta")), ValueError, "mask: expected device cpu like query, got meta"),
    "interval for other keys": (lambda: attend(mask=IntervalMask.causal(13)), ValueError, "mask: expected an IntervalMask for Sk=12 keys, got one for 13"),
    "interval for other batch": (lambda: attend(mask=IntervalMask.padding(12, torch.tensor([1, 2, 3]))), ValueError, "mask.end: expected [B|1, H|Hkv|1, Sk] with B=2, H=4, Hkv=2, Sq=10, Sk=12, got [3, 1, 12]"),
    "interval on another device": (lambda: attend(mask=IntervalMask.causal(12, device="meta")), ValueError, "mask.start: expected device cpu like query, got meta"),
    "interval of int64": (lambda: IntervalMask(INTS.long(), INTS), TypeError, "start: expected dtype int32, got int64"),
    "interval end of floats": (lambda: IntervalMask(INTS, INTS.float()), TypeError, "end: expected dtype int32, got float32"),
    "interval of lists": (lambda: IntervalMask([0, 1], [2, 3]), TypeError, "start: expected a torch.Tensor, got list"),
    "interval of rank 4": (lambda: IntervalMask(INTS[None, None, None], INTS), ValueError, "start: expected a shape that broadcasts to [B, H|Hkv, Sk], got [1, 1, 1, 12]"),
    "interval of rank 0": (lambda: IntervalMask(INTS[0], INTS), ValueError, "start: expected a shape that broadcasts to [B, H|Hkv, Sk], got []"),
    "interval ends of other shape": (lambda: IntervalMask(INTS, INTS[:5]), ValueError, "end: expected a shape that broadcasts with start [1, 1, 12], got [1, 1, 5]"),
    "interval ends elsewhere": (lambda: IntervalMask(INTS, INTS.to("meta")), ValueError, "end: expected device cpu like start, got meta"),
    "block mask for other lengths": (lambda: attend(mask=BlockMask.from_bool(torch.ones(10, 13, dtype=torch.bool))), ValueError, "mask: expected a BlockMask for Sq=10, Sk=12, got one for Sq=10, Sk=13"),
    "block mask for other heads": (lambda: attend(mask=BlockMask.from_bool(torch.ones(3, 10, 12, dtype=torch.bool))), ValueError, "mask: expected [B|1, H|Hkv|1, Sq, Sk] with B=2, H=4, Hkv=2, Sq=10, Sk=12, got [1, 3, 10, 12]"),
    "block table for other lengths": (lambda: attend(mask=BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), 32)), ValueError, "mask: expected a BlockMask for Sq=10, Sk=12, got one for Sq=64, Sk=64"),
    "from_bool of floats": (lambda: BlockMask.from_bool(torch.ones(4, 4)), TypeError, "mask: expected dtype bool, got float32"),
    "from_bool of rank 1": (lambda: BlockMask.from_bool(torch.ones(4, dtype=torch.bool)), ValueError, "mask: expected [B|1, H|Hkv|1, Sq, Sk] with lengths up to 1048576, got shape [4]"),
    "from_blocks of a list": (lambda: BlockMask.from_blocks([[True]], 16), TypeError, "table: expected a torch.Tensor, got list"),
    "block size 0": (lambda: BlockMask.from_bool(torch.ones(4, 4, dtype=torch.bool), 0), ValueError, "block_size: expected a positive int, got 0"),
    "block size 1.5": (lambda: BlockMask.from_bool(torch.ones(4, 4, dtype=torch.bool), (16, 1.5)), TypeError, "block_size: expected a positive int, got float"),
    "three block sizes": (lambda: BlockMask.from_bool(torch.ones(4, 4, dtype=torch.bool), (1, 2, 3)), ValueError, "block_size: expected an int or (bq, bk), got (1, 2, 3)"),
    "function of floats": (lambda: BlockMask.from_function(lambda b, h, q, k: q * 1.0, None, None, 4, 4), TypeError, "fn: expected it to return a bool tensor, got torch.float32"),
    "function of a bool": (lambda: BlockMask.from_function(lambda b, h, q, k: True, None, None, 4, 4), TypeError, "fn: expected it to return a bool tensor, got bool"),
    "from_flex of a tensor": (lambda: BlockMask.from_flex(INTS), TypeError, "block_mask: expected a torch.nn.attention.flex_attention.BlockMask, got Tensor"),
    "to_bool of other keys": (lambda: IntervalMask.causal(5).to_bool(5, 6), ValueError, "Sk: expected the mask's own number of keys 5, got 6"),
    # constructors
    "negative length": (lambda: IntervalMask.causal(-1), ValueError, "Sk: expected 0 <= Sk <= 1048576, got -1"),
    "length of a float": (lambda: IntervalMask.causal(4.0), TypeError, "Sk: expected an int >= 0, got float"),
    "negative window": (lambda: IntervalMask.sliding_window(5, -1), ValueError, "left: expected 0 <= left <= 1048576, got -1"),
    "negative sink_keys": (lambda: IntervalMask.streaming(5, -1, 2), ValueError, "sink_keys: expected 0 <= sink_keys <= 1048576, got -1"),
    "no documents": (lambda: IntervalMask.documents(5), ValueError, "cu_seqlens, ids: expected exactly one of them, got none"),
    "documents twice": (lambda: IntervalMask.documents(5, INTS, ids=INTS), ValueError, "cu_seqlens, ids: expected exactly one of them, got both"),
    "cu_seqlens not from 0": (lambda: IntervalMask.documents(5, torch.tensor([1, 5])), ValueError, "cu_seqlens: expected 0 = c[0] <= c[1] <= ... <= c[-1] = Sk = 5, got [1, 5]"),
    "cu_seqlens decreasing": (lambda: IntervalMask.documents(5, torch.tensor([0, 4, 3, 5])), ValueError, "cu_seqlens: expected 0 = c[0] <= c[1] <= ... <= c[-1] = Sk = 5, got [0, 4, 3, 5]"),
    "cu_seqlens ends early": (lambda: IntervalMask.documents(5, torch.tensor([0, 4])), ValueError, "cu_seqlens: expected 0 = c[0] <= c[1] <= ... <= c[-1] = Sk = 5, got [0, 4]"),
    "cu_seqlens of floats": (lambda: IntervalMask.documents(5, torch.tensor([0.0, 5.0])), TypeError, "cu_seqlens: expected dtype int32, int64, got float32"),
    "cu_seqlens of rank 2": (lambda: IntervalMask.documents(5, torch.tensor([[0, 5]])), ValueError, "cu_seqlens: expected one dimension [documents + 1] with at least one document, got shape [1, 2]"),
    "cu_seqlens too short": (lambda: IntervalMask.documents(5, torch.tensor([0])), ValueError, "cu_seqlens: expected one dimension [documents + 1] with at least one document, got shape [1]"),
    "cu_seqlens a list": (lambda: IntervalMask.documents(5, [0, 5]), TypeError, "cu_seqlens: expected a torch.Tensor, got list"),
    "ids of other length": (lambda: IntervalMask.documents(5, ids=torch.tensor([0, 1])), ValueError, "ids: expected [Sk] or [B, Sk] with Sk=5, got shape [2]"),
    "ids of floats": (lambda: IntervalMask.documents(2, ids=torch.tensor([0.0, 1.0])), TypeError, "ids: expected dtype int32, int64, got float32"),
    "padding of floats": (lambda: IntervalMask.padding(5, torch.tensor([2.0])), TypeError, "lengths: expected dtype int32, int64, got float32"),
    "padding of a list": (lambda: IntervalMask.padding(5, [2, 3]), TypeError, "lengths: expected an int or a tensor [B], got list"),
    "negative padding": (lambda: IntervalMask.padding(5, torch.tensor([3, -2])), ValueError, "lengths: expected lengths from 0 to 1048576, got -2"),
    "sinks of key heads": (lambda: attend(sinks=rows(2)), ValueError, "sinks: expected [H] with H=4, got [2]"),
    "offset of floats": (lambda: attend(query_offset=0.5), TypeError, "query_offset: expected an int or a tensor of integers, got float"),
    "offsets of another batch": (lambda: attend(query_offset=torch.tensor([1, 2, 3])), ValueError, "query_offset: expected an int or a tensor [] or [B] with B=2, got [3]"),
    "offsets of queries": (lambda: attend(query_offset=torch.zeros(2, 10, dtype=torch.int64)), ValueError, "query_offset: expected an int or a tensor [] or [B], got shape [2, 10]"),
    "lse of a row": (lambda: dmattn.lse_with_sink(rows(4, 10), rows(4)), ValueError, "lse: expected 3 dimensions [B, H, Sq], got shape [4, 10]"),
    "weights of head 4": (lambda: dmattn.attention_weights(Q, K, heads=4), ValueError, "heads: expected numbers from 0 to 3, got [4]"),
    "weights of row -1": (lambda: dmattn.attention_weights(Q, K, rows=[0, -1]), ValueError, "rows: expected numbers from 0 to 9, got [0, -1]"),
    "weights of a row of floats": (lambda: dmattn.attention_weights(Q, K, rows=[0.5]), TypeError, "rows: expected ints, got float"),
    "weights with another lse": (lambda: dmattn.attention_weights(Q, K, None, rows(2, 4, 9)), ValueError, "lse: expected [B, H, Sq] with B=2, H=4, Sq=10, got [2, 4, 9]"),
    "padding of the middle": (lambda: IntervalMask.padding(5, 3, "middle"), ValueError, """side: expected 'left' or 'right', got 'middle'"""),
    "chunks of nothing": (lambda: IntervalMask.chunked(5, 0), ValueError, "size: expected a positive int, got 0"),
    "chunks of halves": (lambda: IntervalMask.chunked(5, 2.5), TypeError, "size: expected a positive int, got float"),
    "tree of floats": (lambda: IntervalMask.tree(INTS.float(), INTS), TypeError, "enter: expected dtype int32, int64, got float32"),
    "tree of lists": (lambda: IntervalMask.tree(INTS, [1]), TypeError, "leave: expected a torch.Tensor, got list"),
    "tree of rank 3": (lambda: IntervalMask.tree(INTS[None, None], INTS), ValueError, "enter: expected [Sk] or [B, Sk] with at most 1048576 keys, got shape [1, 1, 12]"),
    "tree of two shapes": (lambda: IntervalMask.tree(INTS, INTS[:5]), ValueError, "leave: expected torch.int32 [1, 12] like enter, got torch.int32 [1, 5]"),
    "tree elsewhere": (lambda: IntervalMask.tree(INTS, INTS.to("meta")), ValueError, "leave: expected device cpu like enter, got meta"),
    "tree out of order": (lambda: IntervalMask.tree(torch.tensor([0, 2, 1]), torch.tensor([3, 3, 2])), ValueError, "enter: expected keys in depth-first order"),
    "parents out of order": (lambda: IntervalMask.tree_from_parents(torch.tensor([-1, 0, 0, 1])), ValueError, "parents: expected nodes in depth-first order, each one's parent being -1, the node before it or an ancestor of that, got 1 for node 3"),
    "parents ahead": (lambda: IntervalMask.tree_from_parents(torch.tensor([1, -1])), ValueError, "parents: expected nodes in depth-first order, each one's parent being -1, the node before it or an ancestor of that, got 1 for node 0"),
    "its own parent": (lambda: IntervalMask.tree_from_parents(torch.tensor([-1, 1])), ValueError, "parents: expected nodes in depth-first order"),
    "parents of -2": (lambda: IntervalMask.tree_from_parents(torch.tensor([-2])), ValueError, "parents: expected nodes in depth-first order"),
    "parents of floats": (lambda: IntervalMask.tree_from_parents(torch.tensor([-1.0])), TypeError, "parents: expected dtype int32, int64, got float32"),
    "interval with a gap": (lambda: IntervalMask.from_bool(torch.tensor([[True, True], [False, True], [True, True]])), ValueError, "mask: expected every key to be visible to one unbroken run of queries, got key 0 of batch 0, head 0 visible to 2 of the queries from 0 to 2"),
    "interval from a float mask": (lambda: IntervalMask.from_bool(torch.zeros(2, 2)), TypeError, "mask: expected dtype bool, got float32"),
    "interval from one row": (lambda: IntervalMask.from_bool(torch.ones(2, dtype=torch.bool)), ValueError, "mask: expected [B|1, H|Hkv|1, Sq, Sk] with lengths up to 1048576, got shape [2]"),
    "interval function with a gap": (lambda: IntervalMask.from_function(lambda b, h, q, k: q % 2 == k % 2, None, None, 4, 4), ValueError, "fn: expected every key to be visible to one unbroken run of queries, got key 0 of batch 0, head 0 visible to 2 of the queries from 0 to 2"),
    "interval function of floats": (lambda: IntervalMask.from_function(lambda b, h, q, k: q * 1.0, None, None, 4, 4), TypeError, "fn: expected it to return a bool tensor, got torch.float32"),
    "interval function of other sizes": (lambda: IntervalMask.from_function(lambda b, h, q, k: torch.ones(3, dtype=torch.bool), None, None, 4, 4), ValueError, "fn: expected a result that broadcasts to [B, H, Sq, Sk] = [1, 1, 4, 4], got [3]"),
    "interval function of half a head": (lambda: IntervalMask.from_function(len, None, 0.5, 4, 4), TypeError, "H: expected an int >= 0, got float"),
    "shift by a float": (lambda: IntervalMask.causal(5).shift(1.0), TypeError, "n: expected an int or a tensor of integers, got float"),
    "shift by a tensor of floats": (lambda: IntervalMask.causal(5).shift(torch.ones(1)), TypeError, "n: expected an int, or a tensor of int32 or int64, got torch.float32"),
    "shift by rank 2": (lambda: IntervalMask.causal(5).shift(torch.ones(1, 1, dtype=torch.int64)), ValueError, "n: expected an int or a tensor [] or [B], got shape [1, 1]"),
    "shift beyond int32": (lambda: IntervalMask.causal(5).shift(2**31), ValueError, "n: expected an int of magnitude below 2^31 - 1, got 2147483648"),
    "shift from elsewhere": (lambda: IntervalMask.causal(5).shift(torch.ones(1, dtype=torch.int64, device="meta")), ValueError, "n: expected device cpu, got meta"),
    "alive at a bool": (lambda: IntervalMask.causal(5).alive(True), TypeError, "position: expected an int or a tensor of integers, got bool"),
    "to_tensor of any length": (lambda: IntervalMask(INTS[:1], INTS[:1]).to_tensor(), ValueError, "Sk: expected the number of keys for a mask that serves any, got None"),
    "to_tensor of other keys": (lambda: IntervalMask.causal(5).to_tensor(6), ValueError, "Sk: expected the mask's own number of keys 5, got 6"),
    "from_tensor of int64": (lambda: IntervalMask.from_tensor(INTS.long()), TypeError, "tensor: expected dtype int32, got int64"),
    "from_tensor of rank 3": (lambda: IntervalMask.from_tensor(INTS[None, None]), ValueError, "tensor: expected 4 dimensions [B|1, H|Hkv|1, 2, Sk], got shape [1, 1, 12]"),
    "prefix of rank 2": (lambda: IntervalMask.prefix(5, torch.tensor([[2]])), ValueError, "prefix_lengths: expected an int or a tensor [B], got shape [1, 1]"),
    "prefix of a string": (lambda: IntervalMask.prefix(5, "2"), TypeError, "prefix_lengths: expected an int or a tensor [B], got str"),
    # selection
    "window 0": (lambda: dma(window=0), ValueError, "window: expected a positive int, got 0"),
    "window -3": (lambda: IntervalMask.top_k(S, -3), ValueError, "window: expected a positive int, got -3"),
    "window True": (lambda: dma(window=True), TypeError, "window: expected a positive int, got bool"),
    "window 2.0": (lambda: dma(window=2.0), TypeError, "window: expected a positive int, got float"),
    "local -1": (lambda: IntervalMask.top_k(S, 3, local=-1), ValueError, "local: expected an int >= 0, got -1"),
    "local True": (lambda: dma(local=True), TypeError, "local: expected an int >= 0, got bool"),
    "local beyond int64": (lambda: dma(local=2**63), ValueError, "local: expected an int >= 0 up to 2^63 - 1, got"),
    "sink_keys -2": (lambda: dma(sink_keys=-2), ValueError, "sink_keys: expected an int >= 0, got -2"),
    "sink 1.0": (lambda: IntervalMask.top_k(S, 3, sink_keys=1.0), TypeError, "sink_keys: expected an int >= 0, got float"),
    "window -1 beside a local window": (lambda: dma(window=-1, local=2), ValueError, "window: expected an int >= 0, got -1"),
    "window None beside sinks": (lambda: dma(window=None, sink_keys=2), TypeError, "window: expected an int >= 0, got NoneType"),
    "local without causality": (lambda: IntervalMask.top_k(S, 3, False, local=2), ValueError, "local, sink_keys: expected 0 and 0 with is_causal=False, got 2 and 0"),
    "sink_keys without causality": (lambda: dma(is_causal=False, sink_keys=1), ValueError, "local, sink_keys: expected 0 and 0 with is_causal=False, got 0 and 1"),
    "sink_keys over a causal base": (lambda: dma(is_causal=False, sink_keys=1, base=IntervalMask.documents(12, torch.tensor([0, 12]))), ValueError, "local, sink_keys: expected 0 and 0 with is_causal=False, got 0 and 1"),
    "scores of rank 2": (lambda: IntervalMask.top_k(S[0], 3), ValueError, "scores: expected 3 dimensions [B, Hkv, Sk], got shape [2, 12]"),
    "scores of integers": (lambda: IntervalMask.top_k(S.int(), 3), TypeError, "scores: expected dtype float64, float32, bfloat16, float16, got int32"),
    "scores on another device": (lambda: dma(S.to("meta")), ValueError, "scores: expected device cpu like query, got meta"),
    "scores per query head": (lambda: dma(rows(2, 4, 12)), ValueError, "scores: expected [B, Hkv, Sk] = [2, 2, 12], got [2, 4, 12]"),
    "base is a tensor": (lambda: dma(base=INTS), TypeError, "base: expected an IntervalMask, got Tensor"),
    "base slides": (lambda: dma(base=IntervalMask.sliding_window(12, 3)), ValueError, "base: expected documents, padding or their intersection"),
    "base of other heads": (lambda: dma(base=IntervalMask(INTS.expand(1, 3, 12), INTS.expand(1, 3, 12)).as_base("causal")), ValueError, "base: expected [B|1, Hkv|1, Sk] with B=2, Hkv=2, Sk=12, got [1, 3, 12]"),
    "base of other keys": (lambda: dma(base=IntervalMask.padding(11, 4)), ValueError, "base: expected [B|1, Hkv|1, Sk] with B=2, Hkv=2, Sk=12, got [1, 1, 11]"),
    # biases and options
    "key_bias of other keys": (lambda: attend(key_bias=rows(2, 2, 11)), ValueError, "key_bias: expected [B|1, H|Hkv|1, Sk] with B=2, H=4, Hkv=2, Sq=10, Sk=12, got [2, 2, 11]"),
    "key_bias of rank 4": (lambda: attend(key_bias=rows(1, 1, 1, 12)), ValueError, "key_bias: expected [B|1, H|Hkv|1, Sk], got shape [1, 1, 1, 12]"),
    "bias of one column does not broadcast": (lambda: attend(bias=rows(9, 1)), ValueError, "bias: expected [B|1, H|Hkv|1, Sq|1, Sk] with B=2, H=4, Hkv=2, Sq=10, Sk=12, got [9, 1]"),
    "bias does not broadcast": (lambda: attend(bias=rows(9, 12)), ValueError, "bias: expected [B|1, H|Hkv|1, Sq|1, Sk] with B=2, H=4, Hkv=2, Sq=10, Sk=12, got [9, 12]"),
    "bias of rank 0": (lambda: attend(bias=torch.tensor(1.0)), ValueError, "bias: expected [B|1, H|Hkv|1, Sq|1, Sk], got shape []"),
    "scale NaN": (lambda: attend(scale=NAN), ValueError, "scale: expected a finite number, got nan"),
    "scale inf": (lambda: attend(scale=INF), ValueError, "scale: expected a finite number, got inf"),
    "scale a string": (lambda: attend(scale="1"), TypeError, "scale: expected a number, got str"),
    "scale a tensor": (lambda: attend(scale=torch.tensor(1.0)), TypeError, "scale: expected a number, got Tensor"),
    "softcap negative": (lambda: attend(softcap=-1.0), ValueError, "softcap: expected a finite number >= 0, got -1.0"),
    "softcap NaN": (lambda: attend(softcap=NAN), ValueError, "softcap: expected a finite number >= 0, got nan"),
    "dropout of 1": (lambda: attend(dropout_p=1.0), ValueError, "dropout_p: expected 0 <= dropout_p < 1, got 1.0"),
    "dropout negative": (lambda: attend(dropout_p=-0.1), ValueError, "dropout_p: expected 0 <= dropout_p < 1, got -0.1"),
    "dropout NaN": (lambda: attend(dropout_p=NAN), ValueError, "dropout_p: expected 0 <= dropout_p < 1, got nan"),
    "seed of floats": (lambda: attend(dropout_p=0.1, dropout_seed=torch.tensor([NAN])), TypeError, "dropout_seed: expected dtype int64, got float32"),
    "seed of int32": (lambda: attend(dropout_p=0.1, dropout_seed=INTS[:1]), TypeError, "dropout_seed: expected dtype int64, got int32"),
    "two seeds": (lambda: attend(dropout_p=0.1, dropout_seed=torch.tensor([1, 2])), ValueError, "dropout_seed: expected one element, got shape [2]"),
    # other functions and the layer
    "key_scores weight": (lambda: dmattn.key_scores(V, rows(2, 15), rows(2)), ValueError, "dt_proj: expected shape [2, 16] for value [2, 2, 12, 8], got [2, 15]"),
    "key_scores A": (lambda: dmattn.key_scores(V, rows(2, 16), rows(3)), ValueError, "A: expected shape [2] for value [2, 2, 12, 8], got [3]"),
    "key_scores value": (lambda: dmattn.key_scores(V[0], rows(2, 16), rows(2)), ValueError, "value: expected 4 dimensions [B, Hkv, Sk, Dv], got shape [2, 12, 8]"),
    "sdpa of rank 1": (lambda: dmattn.scaled_dot_product_attention(Q[0, 0, 0], K, V), ValueError, "query: expected at least 2 dimensions [..., L, E], got shape [16]"),
    "sdpa mask a list": (lambda: dmattn.scaled_dot_product_attention(Q, Q, Q, [1]), TypeError, "attn_mask: expected a torch.Tensor, got list"),
    "flash_dma of rank 3": (lambda: dmattn.flash_dma_attention(Q[0], K, V, rows(2, 32), rows(2)), ValueError, "query: expected 4 dimensions [B, S, heads, D], got shape [4, 10, 16]"),
    "layer window": (lambda: DynamicMaskAttention(64, 4, window=0), ValueError, "window: expected a positive int, got 0"),
    "layer local": (lambda: DynamicMaskAttention(64, 4, local=-1), ValueError, "local: expected an int >= 0, got -1"),
    "layer sink_keys": (lambda: DynamicMaskAttention(64, 4, is_causal=False, sink_keys=2), ValueError, "local, sink_keys: expected 0 and 0 with is_causal=False, got 0 and 2"),
    "layer local heads": (lambda: DynamicMaskAttention(64, 4, local=2, recipe=ScoreRecipe.doge(local_heads=4)), ValueError, "local_heads: expected fewer than the 4 key heads, and local > 0, got 4 with local=2"),
    "layer local heads without local": (lambda: DynamicMaskAttention(64, 4, recipe=ScoreRecipe.doge(local_heads=1)), ValueError, "local_heads: expected fewer than the 4 key heads, and local > 0, got 1 with local=0"),
    "layer score": (lambda: ScoreRecipe(score="log"), ValueError, "score: expected 'exp', 'linear' or a torch.nn.Module, got 'log'"),
    "layer score of another width": (lambda: DynamicMaskAttention(64, 4, recipe=ScoreRecipe(score=torch.nn.Linear(64, 3)))(rows(1, 5, 64)), ValueError, "score: expected [B, S, Hkv] with B=1, S=5, Hkv=4, got [1, 5, 3]"),
    "layer recipe": (lambda: DynamicMaskAttention(64, 4, recipe="doge"), TypeError, "recipe: expected None or a ScoreRecipe, got str"),
    "layer recency": (lambda: ScoreRecipe(recency=0.0), ValueError, "recency: expected None, or a number > 0, got 0.0"),
    "layer recency without causality": (lambda: DynamicMaskAttention(64, 4, is_causal=False, recipe=ScoreRecipe.doge(recency=0.1)), ValueError, "recency: expected None with is_causal=False, got 0.1"),
    "layer score loss without causality": (lambda: DynamicMaskAttention(64, 4, is_causal=False)(rows(1, 5, 64), with_score_loss=True), ValueError, "with_score_loss: expected False with is_causal=False"),
    "layer window of a call": (lambda: DynamicMaskAttention(64, 4)(rows(1, 5, 64), window=0), ValueError, "window: expected a positive int, got 0"),
    "score loss lengths": (lambda: score_loss(rows(1, 2, 5, 8), rows(1, 2, 6, 8), rows(1, 2, 6)), ValueError, "key: expected as many keys as queries, 5, got 6"),
    "score loss of scores elsewhere": (lambda: score_loss(rows(1, 2, 5, 8), rows(1, 2, 5, 8), rows(1, 2, 5).to("meta")), ValueError, "scores: expected device cpu like query, got meta"),
    "score loss under a sliding window": (lambda: score_loss(rows(1, 2, 5, 8), rows(1, 2, 5, 8), rows(1, 2, 5), base=IntervalMask.sliding_window(5, 2)), ValueError, "base: expected documents, padding or their intersection"),
    "score loss base of other keys": (lambda: score_loss(rows(1, 2, 5, 8), rows(1, 2, 5, 8), rows(1, 2, 5), base=IntervalMask.causal(6)), ValueError, "base: expected [B|1, Hkv|1, Sk] with B=1, Hkv=2, Sk=5, got [1, 1, 6]"),
    "score loss of countless queries": (lambda: score_loss(rows(1, 2, 5, 8), rows(1, 2, 5, 8), rows(1, 2, 5), queries=2**31), ValueError, "queries: expected at most 1048576, got 2147483648"),
    "layer score queries without end": (lambda: ScoreRecipe(queries=2**31), ValueError, "queries: expected at most 1048576, got 2147483648"),
    "score loss last": (lambda: score_loss(rows(1, 2, 5, 8), rows(1, 2, 5, 8), rows(1, 2, 5), last=1.5), ValueError, "last: expected 0 <= last <= 1, got 1.5"),
    "score loss first head 2": (lambda: score_loss(rows(1, 2, 5, 8), rows(1, 2, 5, 8), rows(1, 2, 5), first_head=2), ValueError, "first_head: expected"),
    "score loss first head -1": (lambda: score_loss(rows(1, 2, 5, 8), rows(1, 2, 5, 8), rows(1, 2, 5), first_head=-1), ValueError, "first_head: expected"),
    "score loss first head 1.0": (lambda: score_loss(rows(1, 2, 5, 8), rows(1, 2, 5, 8), rows(1, 2, 5), first_head=1.0), TypeError, "first_head: expected"),
    "recommended odd": (lambda: DynamicMaskAttention.recommended(64, 4, 30), ValueError, "visible: expected a multiple of 4, got 30"),
    "recommended too many": (lambda: IndexedAttention.recommended(64, 4, 2**21), ValueError, "visible: expected 0 <= visible <= 1048576, got 2097152"),
    "recommended one key head": (lambda: DynamicMaskAttention.recommended(64, 4, 32, num_kv_heads=1), ValueError, "num_kv_heads: expected at least 2"),
    "recommended no number": (lambda: DynamicMaskAttention.recommended(64, 4, None), TypeError, "visible: expected a positive int, got NoneType"),
    "score loss scores": (lambda: score_loss(rows(1, 2, 5, 8), rows(1, 2, 5, 8), rows(1, 2, 6)), ValueError, "scores: expected [B, Hkv, S] = [1, 2, 5], got [1, 2, 6]"),
    "schedule length": (lambda: WindowSchedule(30, 20), ValueError, "length: expected at least window=30, got 20"),
    "schedule step": (lambda: WindowSchedule(3, 20)(-1), ValueError, "step: expected an int >= 0, got -1"),
    "layer heads": (lambda: DynamicMaskAttention(64, 4, num_kv_heads=3), ValueError, "num_kv_heads: expected a divisor of num_heads=4, got 3"),
    "layer size": (lambda: DynamicMaskAttention(66, 4), ValueError, "embed_dim: expected a multiple of num_heads=4 when head_dim is not given, got 66"),
    "layer padding side without a cache": (lambda: DynamicMaskAttention(64, 4)(rows(1, 5, 64), padding_side="left"), ValueError, "padding_side: expected its default without a cache, got 'left'"),
    "layer tiny rope_theta": (lambda: DynamicMaskAttention(64, 4, rope_theta=1e-300), ValueError, "rope_theta: expected None or a number > 0, got 1e-300"),
    "layer huge recency": (lambda: ScoreRecipe(recency=1e300), ValueError, "recency: expected 0 <= recency <= 1e+30, got 1e+300"),
    "rotation of an odd size": (lambda: rotate(rows(1, 2, 5, 7), 1e4), ValueError, "x: expected [B, H, S, D] with an even D, got [1, 2, 5, 7]"),
    "rotation of rank 3": (lambda: rotate(rows(2, 5, 8), 1e4), ValueError, "x: expected [B, H, S, D] with an even D, got [2, 5, 8]"),
    "rotation of integers": (lambda: rotate(torch.ones(1, 2, 5, 8, dtype=torch.int64), 1e4), TypeError, "x: expected dtype float64, float32, bfloat16, float16, got int64"),
    "rotation to positions of another batch": (lambda: rotate(rows(1, 2, 5, 8), 1e4, torch.zeros(4, 5)), ValueError, "positions: expected [B|1, S] with B=1, S=5, got [4, 5]"),
    "rotation to other positions": (lambda: rotate(rows(1, 2, 5, 8), 1e4, torch.zeros(1, 4)), ValueError, "positions: expected [B|1, S] with B=1, S=5, got [1, 4]"),
    "layer positions of another length": (lambda: DynamicMaskAttention(64, 4).projected(rows(2, 5, 64), torch.zeros(1, 4)), ValueError, "positions: expected [B|1, S] with B=2, S=5, got [1, 4]"),
    "layer rotation of another batch": (lambda: DynamicMaskAttention(64, 4).projected(rows(2, 5, 64), rotation=DynamicMaskAttention(64, 4).rotation(torch.zeros(3, 5))), ValueError, "rotation: expected [B|1, S, 1, pairs] with B=2, S=5, pairs=8, got [3, 5, 1, 8]"),
    "layer rotation of other pairs": (lambda: DynamicMaskAttention(64, 4)(rows(2, 5, 64), rotation=DynamicMaskAttention(64, 4, head_dim=8).rotation(torch.zeros(1, 5))), ValueError, "rotation: expected [B|1, S, 1, pairs] with B=2, S=5, pairs=8, got [1, 5, 1, 4]"),
    "layer rotation as one tensor": (lambda: DynamicMaskAttention(64, 4)(rows(2, 5, 64), rotation=torch.zeros(2, 1, 5, 1, 8)), TypeError, "rotation: expected the two tensors that layer.rotation(positions) gives, got Tensor"),
    "layer rotation in another dtype": (lambda: DynamicMaskAttention(64, 4)(rows(2, 5, 64), rotation=DynamicMaskAttention(64, 4).rotation(torch.zeros(1, 5), torch.bfloat16)), TypeError, "rotation: expected dtype float32 like query, got bfloat16"),
    "layer rotation for none": (lambda: DynamicMaskAttention(64, 4, rope_theta=None)(rows(2, 5, 64), rotation=DynamicMaskAttention(64, 4).rotation(torch.zeros(1, 5))), ValueError, "rotation: expected None for a layer with rope_theta=None, got cosines and sines"),
    "layer rotation and positions": (lambda: DynamicMaskAttention(64, 4).projected(rows(2, 5, 64), torch.zeros(1, 5), rotation=DynamicMaskAttention(64, 4).rotation(torch.zeros(1, 5))), ValueError, "positions, rotation: expected at most one of them, got both"),
    "layer rotation to a row of positions": (lambda: DynamicMaskAttention(64, 4).rotation(torch.zeros(5)), ValueError, "positions: expected 2 dimensions [B|1, S], got shape [5]"),
    "layer rotation in integers": (lambda: DynamicMaskAttention(64, 4).rotation(torch.zeros(1, 5), torch.int32), TypeError, "dtype: expected that of query and key, a floating-point one, got torch.int32"),
    "layer that does not rotate": (lambda: DynamicMaskAttention(64, 4, rope_theta=None).rotation(torch.zeros(1, 5)), ValueError, "rotation: expected a layer with rope_theta, got one with None"),
    "layer head size": (lambda: DynamicMaskAttention(64, 4, head_dim=12), ValueError, "head_dim: expected a multiple of 8 up to 256, got 12"),
    "layer input": (lambda: DynamicMaskAttention(64, 4)(rows(3, 64)), ValueError, "hidden_states: expected 3 dimensions [B, S, E], got shape [3, 64]"),
    "flag of text": (lambda: attend(is_causal="yes"), TypeError, "is_causal: expected a bool, got str"),
    "deterministic of text": (lambda: attend(deterministic="x"), TypeError, "deterministic: expected a bool, got str"),
    "index_query of rank 4": (lambda: dmattn.index_top_k(IQ[:, :, 0], IK, IW, 3), ValueError, "index_query: expected 5 dimensions [B, G, Sq, Hi, Di], got shape [2, 2, 3, 8]"),
    "index_key of other groups": (lambda: dmattn.index_top_k(IQ, IK[:, :1], IW, 3), ValueError, "index_key: expected [B, G, Sk, Di] with B=2, G=2, Di=8, got [2, 1, 12, 8]"),
    "index_key of another dtype": (lambda: dmattn.index_top_k(IQ, IK.double(), IW, 3), TypeError, "index_key: expected dtype torch.float32 like index_query, got torch.float64"),
    "index_query without heads": (lambda: dmattn.index_top_k(IQ[:, :, :, :0], IK, IW[..., :0], 3), ValueError, "index_query: expected 1 to 128 heads Hi, got 0"),
    "index_key too long": (lambda: dmattn.index_top_k(IQ[:1, :1], IK[:1, :1, :1].expand(1, 1, 2**20 + 1, 8), IW[:1, :1], 3), ValueError, "index_key: expected lengths up to 1048576, got 1048577"),
    "weights without heads": (lambda: dmattn.index_top_k(IQ, IK, IW[..., 0], 3), ValueError, "weights: expected 4 dimensions [B, G, Sq, Hi], got shape [2, 2, 10]"),
    "weights of integers": (lambda: dmattn.index_top_k(IQ, IK, IW.int(), 3), TypeError, "weights: expected dtype float64, float32, bfloat16, float16, got int32"),
    "slope of one head": (lambda: dmattn.index_top_k(IQ, IK, IW, 3, slope=torch.ones(1)), ValueError, "slope: expected [G] with G=2, got [1]"),
    "k of an indexer": (lambda: dmattn.index_top_k(IQ, IK, IW, -1), ValueError, "k: expected an int >= 0, got -1"),
    "block_score mean": (lambda: dmattn.index_top_k(IQ, IK, IW, 3, block_size=4, block_score="mean"), ValueError, "block_score: expected 'max' or 'mean_key', got 'mean'"),
    "block_size 24": (lambda: dmattn.index_top_k(IQ, IK, IW, 3, block_size=24), ValueError, "block_size: expected a power of two from 1 to 128, got 24"),
    "base of four heads": (lambda: dmattn.index_top_k(IQ, IK, IW, 3, base=IntervalMask.top_k(torch.rand(1, 4, 12), 3)), ValueError, "base: expected [B|1, G|1, Sk] with B=2, G=2, got [1, 4, 12]"),
    "index base of other keys": (lambda: dmattn.index_top_k(IQ, IK, IW, 3, base=IntervalMask.sliding_window(11, 3)), ValueError, "base: expected a mask for 12 keys, got one for 11"),
    "base that is a tensor": (lambda: dmattn.index_top_k(IQ, IK, IW, 3, base=torch.ones(10, 12) > 0), TypeError, "base: expected an IntervalMask, got Tensor"),
    "index pages of rank 3": (lambda: dmattn.index_top_k(IQ, rows(4, 16, 8), IW, 3, page_table=torch.zeros(2, 2, dtype=torch.int32), lengths=LENGTHS), ValueError, "index_key: expected 4 dimensions [pages, page_size, G, Di], got shape [4, 16, 8]"),
    "page_table without lengths": (lambda: dmattn.index_top_k(IQ, rows(4, 16, 2, 8), IW, 3, page_table=torch.zeros(2, 2, dtype=torch.int32)), ValueError, "lengths: expected int32 [B] with page_table, got None"),
    "query_offset of three": (lambda: dmattn.index_top_k(IQ, IK, IW, 3, query_offset=torch.zeros(3, dtype=torch.int64)), ValueError, "query_offset: expected an int or a tensor [] or [B] with B=2, got [3]"),
    "rows beyond": (lambda: dmattn.index_scores(IQ, IK, IW, rows=torch.tensor([10])), ValueError, "rows: expected numbers from 0 to 9, got [10]"),
    "activation gelu": (lambda: dmattn.index_scores(IQ, IK, IW, activation="gelu"), ValueError, "activation: expected 'relu' or 'none', got 'gelu'"),
    "rows beside a mask": (lambda: dmattn.index_loss(IQ, IK, IW, *QK, rows=torch.arange(3), mask=IndexMask(torch.zeros(10, 3, dtype=torch.int32))), ValueError, "rows, mask: expected at most one of them, got both"),
    "lists of other blocks": (lambda: dmattn.index_loss(IQ, IK, IW, *QK, mask=IndexMask(torch.zeros(10, 3, dtype=torch.int32), 4)), ValueError, "mask: expected an IndexMask for Sq=10 in blocks of 1, got Sq=10 in blocks of 4"),
    "loss of other lengths": (lambda: dmattn.index_loss(IQ[:, :, :9], IK, IW[:, :, :9], *QK), ValueError, "index_query, index_key: expected Sq=10 like query and key, got 9"),
    "loss of three groups": (lambda: dmattn.index_loss(rows(2, 3, 10, 3, 8), rows(2, 3, 12, 8), rows(2, 3, 10, 3), *QK), ValueError, "index_query: expected a number of groups G that goes with H=4, Hkv=2, got 3"),
    "offset of tensors": (lambda: dmattn.index_loss(IQ, IK, IW, *QK, query_offset=torch.zeros(2, dtype=torch.int64)), TypeError, "query_offset: expected an int, got Tensor"),
    "window beyond int32": (lambda: IntervalMask.top_k(torch.rand(1, 1, 4), 2**63), ValueError, "window: expected a positive int up to 2^63 - 1"),
    "scale beyond floats": (lambda: attend(scale=10**400), ValueError, "scale: expected a finite number"),
    "scale beyond float32": (lambda: attend(scale=1e39), ValueError, "scale: expected a number of magnitude up to 1e+30"),
    "softcap too large": (lambda: attend(softcap=1e39), ValueError, "softcap: expected 0 or a number from 1e-30 to 1e+30"),
    "softcap too small": (lambda: attend(softcap=1e-39), ValueError, "softcap: expected 0 or a number from 1e-30 to 1e+30"),
    "intervals of other lengths": (lambda: IntervalMask.causal(4) & IntervalMask.causal(5), ValueError, "other: expected a mask for Sk=4 keys like the first, got one for 5"),
    "blocks of other lengths": (
        lambda: BlockMask.from_bool(torch.ones(16, 16, dtype=torch.bool)) & BlockMask.from_bool(torch.ones(20, 20, dtype=torch.bool)),
        ValueError, "other: expected a mask for (Sq, Sk) = (16, 16), got one for (20, 20)"),
    "block size of None": (lambda: BlockMask.from_bool(torch.ones(4, 4, dtype=torch.bool), None), TypeError, "block_size: expected a positive int"),
    "pairs of a tensor": (lambda: dmattn.visible_pairs(torch.ones(4, 4, dtype=torch.bool), 4, 4), TypeError, "mask: expected an IntervalMask"),
    "pairs of other lengths": (
        lambda: dmattn.visible_pairs(BlockMask.from_bool(torch.ones(16, 16, dtype=torch.bool)), 32, 32),
        ValueError, "mask: expected a BlockMask for Sq=32, Sk=32, got one for Sq=16, Sk=16"),
    "sdpa of other head size": (
        lambda: dmattn.scaled_dot_product_attention(torch.randn(1, 1, 4, 3), torch.randn(1, 1, 4, 5), torch.randn(1, 1, 4, 8)),
        ValueError, "key: expected a last dimension E=3 like query, got 5"),
    "rotated heads 0": (lambda: ScoreRecipe(rotated_heads=0), ValueError, "rotated_heads: expected"),
    "rotated heads of more than there are": (lambda: DynamicMaskAttention(16, 2, 4, recipe=ScoreRecipe.doge(rotated_heads=3)), ValueError, "rotated_heads: expected None, or at most 2 key heads"),
    "rotated heads without rotation": (lambda: DynamicMaskAttention(16, 2, 4, rope_theta=None, recipe=ScoreRecipe.doge(rotated_heads=1)), ValueError, "rotated_heads: expected None"),
    "rope_theta 0": (lambda: dmattn.nn.DynamicMaskAttention(16, 2, 4, rope_theta=0.0), ValueError, "rope_theta: expected None or a number > 0"),
    "projection elsewhere": (
        lambda: dmattn.key_scores(torch.randn(1, 1, 4, 8), torch.randn(1, 8, device="meta"), torch.ones(1)),
        ValueError, "dt_proj: expected device cpu like value, got meta"),
    # flags, before anything runs
    "is_causal None": (lambda: dma(is_causal=None), TypeError, "is_causal: expected a bool, got NoneType"),
    "is_causal 0 beside a bad query": (lambda: attend([1.0], is_causal=0), TypeError, "is_causal: expected a bool, got int"),
    "mask from no function": (lambda: BlockMask.from_function(None, 1, 1, 4, 4), TypeError, "fn: expected a function of (b, h, q, k), got NoneType"),
    "sdpa is_causal None": (lambda: sdpa(is_causal=None), TypeError, "is_causal: expected a bool, got NoneType"),
    "sdpa enable_gqa 1": (lambda: sdpa(enable_gqa=1), TypeError, "enable_gqa: expected a bool, got int"),
    # numbers
    "seed of floats without dropout": (lambda: dma(dropout_seed=torch.ones(1)), TypeError, "dropout_seed: expected dtype int64, got float32"),
    "two seeds without dropout": (lambda: attend(dropout_seed=torch.tensor([1, 2])), ValueError, "dropout_seed: expected one element, got shape [2]"),
    "window of an older name": (lambda: flash_dma(keep_window_size=0), ValueError, "keep_window_size: expected a positive int, got 0"),
    "sdpa dropout a tensor": (lambda: sdpa(dropout_p=torch.tensor([0.1, 0.2])), TypeError, "dropout_p: expected a number, got Tensor"),
    "a length that wraps in 32 bits": (
        lambda: attend(key=K[:1, :1, :1].expand(2, 2, 2**32 + 12, 16), value=V[:1, :1, :1].expand(2, 2, 2**32 + 12, 8)),
        ValueError, "query, key: expected lengths up to 1048576, got Sq=10, Sk=4294967308"),
    "scores that are too long": (lambda: dmattn.key_scores(V[:, :, :1].expand(2, 2, 2**32 + 12, 8), rows(2, 16), rows(2)), ValueError, "value: expected a length up to 1048576, got 4294967308"),
    # tensors that are not dense, or not what they seem
    "query sparse": (lambda: attend(Q.to_sparse()), TypeError, "query: expected a dense tensor, got torch.sparse_coo"),
    "bias sparse": (lambda: attend(bias=rows(10, 12).to_sparse()), TypeError, "bias: expected a dense tensor, got torch.sparse_coo"),
    "key_bias of 2^40 keys": (lambda: attend(key_bias=torch.zeros(1, dtype=torch.float16).expand(2**40)), ValueError, "key_bias: expected [B|1, H|Hkv|1, Sk] with B=2, H=4, Hkv=2, Sq=10, Sk=12, got [1099511627776]"),
    "mask of 2^40 keys": (lambda: attend(mask=torch.ones(1, dtype=torch.bool).expand(2**40)), ValueError, "mask: expected [B|1, H|Hkv|1, Sq|1, Sk] with B=2, H=4, Hkv=2, Sq=10, Sk=12, got [1099511627776]"),
    # the drop-in, scores and older names
    "sdpa mask of text": (lambda: sdpa(attn_mask="x"), TypeError, "attn_mask: expected a torch.Tensor, got str"),
    "sdpa mask of integers": (lambda: sdpa(attn_mask=torch.ones(10, 12, dtype=torch.int64)), TypeError, "attn_mask: expected dtype bool, float64, float32, bfloat16, float16, got int64"),
    "sdpa mask on another device": (lambda: sdpa(attn_mask=torch.ones(10, 12, dtype=torch.bool, device="meta")), ValueError, "attn_mask: expected device cpu like query, got meta"),
    "sdpa bias on another device": (lambda: sdpa(attn_mask=torch.ones(10, 12, device="meta")), ValueError, "attn_mask: expected device cpu like query, got meta"),
    "sdpa mask does not broadcast": (lambda: sdpa(attn_mask=rows(11, 12)), ValueError, "attn_mask: expected a shape that broadcasts to [2, 4, 10, 12], got [11, 12]"),
    "sdpa mask of five dimensions": (lambda: sdpa(attn_mask=rows(1, 1, 1, 10, 12)), ValueError, "attn_mask: expected a shape that broadcasts to [2, 4, 10, 12], got [1, 1, 1, 10, 12]"),
    "sdpa batches": (lambda: sdpa(Q, rows(3, 4, 12, 16), rows(3, 4, 12, 16)), ValueError, "query, key, value: expected dimensions that broadcast, got [2], [3] and [3]"),
    "sdpa heads": (lambda: sdpa(Q, K, K), ValueError, "query, key, value: expected head dimensions that broadcast, got [4], [2] and [2]"),
    "key_scores without a projection": (lambda: dmattn.key_scores(V, A=rows(2)), TypeError, "dt_proj: expected a torch.Tensor or a torch.nn.Module, got NoneType"),
    "key_scores of two projections": (lambda: dmattn.key_scores(V, rows(2, 16), rows(2), dt_proj_weight=rows(2, 16)), TypeError, "dt_proj, dt_proj_weight: expected exactly one of them, got both"),
    "key_scores in another dtype": (lambda: dmattn.key_scores(V, rows(2, 16).double(), rows(2)), TypeError, "dt_proj: expected dtype torch.float32 like value, got torch.float64"),
    "key_scores of a function": (lambda: dmattn.key_scores(V, torch.sin, rows(2)), TypeError, "dt_proj: expected a torch.Tensor or a torch.nn.Module, got builtin_function_or_method"),
    "key_scores of a module with a bias beside": (lambda: dmattn.key_scores(V, torch.nn.Linear(16, 2), rows(2), rows(2)), TypeError, "dt_proj_bias: expected None with a module, which has its own bias, got Tensor"),
    "key_scores of a module of other width": (lambda: dmattn.key_scores(V, torch.nn.Linear(16, 3), rows(2)), ValueError, "dt_proj: expected a module that returns [B, Sk, Hkv] = [2, 12, 2], got [2, 12, 3]"),
    "flash mask of floats": (lambda: dmattn.flash_dynamic_mask_attention(Q, K, V, torch.ones(10, 12).double()), TypeError, "attn_mask: expected dtype bool, float32, got float64"),
    "flash additive mask": (lambda: dmattn.flash_dynamic_mask_attention(Q, K, V, torch.full((10, 12), -torch.inf)), ValueError, "attn_mask: expected 1.0 (keep) and 0.0 (hide), or bool, got other values; what is added to logits is a bias"),
    # decoding
    "decode 17 queries": (lambda: decode(rows(2, 4, 17, 16)), ValueError, "query: expected 1 to 16 queries a sequence, got T=17"),
    "decode no query": (lambda: decode(Q[:, :, :0]), ValueError, "query: expected 1 to 16 queries a sequence, got T=0"),
    "decode a cache of rank 3": (lambda: decode(key_cache=K[0]), ValueError, "key_cache: expected 4 dimensions [B, Hkv, Smax, D], got shape [2, 12, 16]"),
    "decode pages of rank 3": (lambda: decode_pages(value_cache=VALUE_POOL[0]), ValueError, "value_cache: expected 4 dimensions [pages, page_size, Hkv, Dv], got shape [16, 2, 8]"),
    "decode another batch": (lambda: decode(key_cache=K[:1]), ValueError, "key_cache: expected [B, Hkv, Smax, D] with B=2, D=16, got [1, 2, 12, 16]"),
    "decode other caches": (lambda: decode(value_cache=V[:, :, 1:]), ValueError, "value_cache: expected [B, Hkv, Smax, Dv] = [2, 2, 12, 'Dv'] like key_cache, got [2, 2, 11, 8]"),
    "decode other pages": (lambda: decode_pages(value_cache=VALUE_POOL[1:]), ValueError, "value_cache: expected [pages, page_size, Hkv, Dv] = [3, 16, 2, 'Dv'] like key_cache, got [2, 16, 2, 8]"),
    "decode another head size": (lambda: decode_pages(key_cache=POOL[..., :8]), ValueError, "key_cache: expected [pages, page_size, Hkv, D] with D=16, got [3, 16, 2, 8]"),
    "decode pages of 8": (lambda: decode_pages(key_cache=POOL[:, :8], value_cache=VALUE_POOL[:, :8]), ValueError, "key_cache: expected a page_size that is a multiple of 16, got 8"),
    "decode pages of none": (lambda: decode_pages(key_cache=POOL[:, :0], value_cache=VALUE_POOL[:, :0]), ValueError, "key_cache: expected a page_size that is a multiple of 16, got 0"),
    "decode heads": (lambda: decode(rows(2, 5, 1, 16)), ValueError, "key_cache: expected a number of heads that divides H=5 of query, got Hkv=2"),
    "decode D": (lambda: decode(Q[..., :12], K[..., :12]), ValueError, "query: expected a last dimension that is a multiple of 8 up to 256, got 12"),
    "decode Dv": (lambda: decode(value_cache=V[..., :4]), ValueError, "value_cache: expected a last dimension that is a multiple of 8 up to 256, got 4"),
    "decode dtypes": (lambda: decode(key_cache=K.double()), TypeError, "key_cache: expected dtype torch.float32 like query, got torch.float64"),
    "decode lengths of int64": (lambda: decode(lengths=LENGTHS.long()), TypeError, "lengths: expected dtype int32, got int64"),
    "decode three lengths": (lambda: decode(lengths=INTS[:3]), ValueError, "lengths: expected [B] = [2], got [3]"),
    "decode a table of int64": (lambda: decode_pages(page_table=TABLE.long()), TypeError, "page_table: expected dtype int32, got int64"),
    "decode a table of rank 1": (lambda: decode_pages(page_table=TABLE[0]), ValueError, "page_table: expected [B, max_pages] with B=2, got [1]"),
    "decode a table of three": (lambda: decode_pages(page_table=torch.zeros(3, 1, dtype=torch.int32)), ValueError, "page_table: expected [B, max_pages] with B=2, got [3, 1]"),
    "decode too long a table": (lambda: decode_pages(page_table=TABLE.expand(2, 65537)), ValueError, "key_cache: expected room for up to 1048576 keys, got 1048592"),
    "decode a bias of 11 keys": (lambda: decode(key_bias=rows(2, 2, 11)), ValueError, "key_bias: expected [B|1, H|Hkv|1, Sk=Smax] with B=2, H=4, Hkv=2, Sq=10, Sk=12, got [2, 2, 11]"),
    "decode a bias of 3 heads": (lambda: decode_pages(key_bias=rows(2, 3, 16)), ValueError, "key_bias: expected [B|1, H|Hkv|1, Sk=Smax] with B=2, H=4, Hkv=2, Sq=10, Sk=16, got [2, 3, 16]"),
    "decode sinks of key heads": (lambda: decode(sinks=rows(2)), ValueError, "sinks: expected [H] with H=4, got [2]"),
    "decode scale": (lambda: decode(scale=1e39), ValueError, "scale: expected a number of magnitude up to 1e+30"),
    "decode softcap": (lambda: decode(softcap=-1.0), ValueError, "softcap: expected a finite number >= 0, got -1.0"),
    "flash_dma coefficients": (lambda: flash_dma(a_coef=rows(3)), ValueError, "a_coef: expected shape [2] for value [2, 2, 12, 8], got [3]"),
}  # fmt: skip


@pytest.mark.brief
@pytest.mark.parametrize(("call", "error", "message"), PUBLIC.values(), ids=PUBLIC)
def test_public_call(call, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        call()
    assert type(caught.value) is error


# Direct op calls --------------------------------------------------------------------------------------------------------------------

ops = torch.ops.dmattn
TABLES = (BLOCK.tiles, BLOCK.rows, BLOCK.columns, BLOCK.bits)
FORWARD = ("query", "key", "value", "start", "end", "tiles", "rows", "columns", "bits", "indices", "index_offset", "key_bias",
           "bias", "dropout_seed",
           "is_causal", "scale", "softcap", "dropout_p", "deterministic")  # fmt: skip


OPTIONS = {"is_causal": False, "scale": 1.0, "softcap": 0.0, "dropout_p": 0.0, "deterministic": False}


def forward(**changes):
    arguments = dict.fromkeys(FORWARD) | {"query": Q, "key": K, "value": V} | OPTIONS
    return ops.forward(*(arguments | changes).values())


def decode_op(**changes):
    arguments = {"query": Q, "key": K, "value": V, "lengths": LENGTHS, "page_table": None, "key_bias": None, "sinks": None,
                 "indices": None, "is_causal": True, "scale": 1.0, "softcap": 0.0, "index_block": 1, "index_local": 0,
                 "index_sinks": 0}  # fmt: skip
    return ops.decode(*(arguments | changes).values())


def backward(**changes):
    out, lse, _ = forward()
    head = {"grad_out": out, "grad_lse": None, "query": Q, "key": K, "value": V, "out": out, "lse": lse}
    rest = dict.fromkeys(FORWARD[3:14]) | OPTIONS
    return ops.backward(*(head | rest | {"need_key_bias": False, "need_bias": False} | changes).values())


def tables(**changes):
    return dict(zip(("tiles", "rows", "columns", "bits"), TABLES, strict=True)) | changes


LISTS = torch.zeros(1, 1, 10, 3, dtype=torch.int32)
WIDE = torch.zeros(1, dtype=torch.int32).as_strided((1, 1, 2**40), (0, 0, 0))  # no copy of it can be made
ones = torch.ones(1, 1, 10, 12, dtype=torch.bool)


STEP_LISTS = torch.zeros(2, 2, Q.shape[2], 3, dtype=torch.int32)


def indexed(**changed):
    """A call of the op index_top_k with some arguments changed."""
    given = {
        "index_query": rows(2, 2, 10, 3, 8), "index_key": rows(2, 2, 12, 8), "weights": rows(2, 2, 10, 3), "slope": None, "start": None,
        "end": None, "query_offset": None, "lengths": None, "key_length": 12, "k": 3, "block_size": 1, "is_pooled": False, "is_causal": True,
        "local": 0, "sink": 0, "scale": 1.0, "with_scores": False,
    }  # fmt: skip
    return ops.index_top_k(*(given | changed).values())


def index_loss_op(**changed):
    """A call of the op index_loss with some arguments changed."""
    given = {
        "logits": rows(2, 2, 3, 5, 12), "products": rows(2, 2, 4, 5, 12), "weights": rows(2, 2, 5, 4), "slope": None, "key_bias": None,
        "lse": None, "positions": torch.arange(5), "lists": None, "start": None, "end": None, "key_length": 12, "block_size": 1,
        "is_pooled": False, "is_causal": True, "local": 0, "sink": 0, "scale": 1.0, "softcap": 0.0, "index_scale": 1.0, "sharp": False,
        "to_bfloat16": False,
    }  # fmt: skip
    return ops.index_loss(*(given | changed).values())


DIRECT = {
    "loss logits rank": (lambda: index_loss_op(logits=rows(2, 2, 3, 5)), "logits: expected 5 dimensions .B, G, h, R, M., got .2, 2, 3, 5"),
    "loss products rank": (lambda: index_loss_op(products=rows(2, 2, 4, 5)), "products: expected 5 dimensions .B, G, Hi, R, N., got .2, 2, 4, 5"),
    "loss logits dtype": (lambda: index_loss_op(logits=rows(2, 2, 3, 5, 12).half()), "logits: expected dtype float32 or float64, got float16"),
    "loss products dtype": (lambda: index_loss_op(products=rows(2, 2, 4, 5, 12).double()), "products: expected dtype float32, got float64"),
    "loss products": (lambda: index_loss_op(products=rows(2, 2, 4, 5, 11)), "products: expected .B, G, Hi, R, N. = .2, 2, 4, 5, 12., got .2, 2, 4, 5, 11"),
    "loss of means": (lambda: index_loss_op(is_pooled=True, block_size=4), "products: expected .B, G, Hi, R, N. = .2, 2, 4, 5, 3., got .2, 2, 4, 5, 12"),
    "loss of other keys": (lambda: index_loss_op(key_length=13), "logits: expected M=13, got .2, 2, 3, 5, 12"),
    "loss of lists": (lambda: index_loss_op(lists=INTS[:1].expand(1, 1, 5, 11)), "logits: expected M=11, got .2, 2, 3, 5, 12"),
    "loss lists rank": (lambda: index_loss_op(lists=INTS), "lists: expected 4 dimensions .B.1, G.1, R, n., got .12."),
    "loss lists": (lambda: index_loss_op(lists=INTS[:1].expand(1, 3, 5, 12)), "lists: expected .B.1, G.1, R, n. with B=2"),
    "loss lists dtype": (lambda: index_loss_op(lists=INTS[:1].long().expand(1, 1, 5, 12)), "lists: expected dtype int32, got int64"),
    "loss without heads": (lambda: index_loss_op(logits=rows(2, 2, 0, 5, 12)), "logits, products: expected at least one head, got .2, 2, 0, 5, 12., .2, 2, 4, 5, 12"),
    "loss weights": (lambda: index_loss_op(weights=rows(2, 2, 4, 5)), "weights: expected .B, G, R, Hi. = .2, 2, 5, 4., got .2, 2, 4, 5"),
    "loss weights dtype": (lambda: index_loss_op(weights=rows(2, 2, 5, 4).half()), "weights: expected dtype float32, got float16"),
    "loss positions": (lambda: index_loss_op(positions=torch.arange(4)), "positions: expected .R. = .5., got .4."),
    "loss positions dtype": (lambda: index_loss_op(positions=torch.arange(5).int()), "positions: expected dtype int64, got int32"),
    "loss slope": (lambda: index_loss_op(slope=rows(3)), "slope: expected .G. = .2., got .3."),
    "loss slope dtype": (lambda: index_loss_op(slope=rows(2).double()), "slope: expected dtype float32, got float64"),
    "loss lse": (lambda: index_loss_op(lse=rows(2, 2, 5, 3)), "lse: expected .B, G, h, R. = .2, 2, 3, 5., got .2, 2, 5, 3"),
    "loss lse dtype": (lambda: index_loss_op(lse=rows(2, 2, 3, 5).double()), "lse: expected dtype float32, got float64"),
    "loss key_bias": (lambda: index_loss_op(key_bias=rows(2, 2, 2, 12)), "key_bias: expected .B.1, G.1, h.1, Sk. with B=2, G=2, h=3, Sk=12, got .2, 2, 2, 12"),
    "loss key_bias rank": (lambda: index_loss_op(key_bias=rows(2, 2, 12)), "key_bias: expected .B.1, G.1, h.1, Sk. with B=2, G=2, h=3, Sk=12, got .2, 2, 12"),
    "loss key_bias dtype": (lambda: index_loss_op(key_bias=rows(1, 1, 1, 12).double()), "key_bias: expected dtype float32, got float64"),
    "loss start dtype": (lambda: index_loss_op(start=torch.zeros(1, 1, 12)), "start: expected dtype int32, got float32"),
    "loss end": (lambda: index_loss_op(end=torch.zeros(1, 1, 11, dtype=torch.int32)), "end: expected .B.1, G.1, Sk."),
    "loss in blocks of 3": (lambda: index_loss_op(block_size=3), "block_size: expected a power of two up to 128, got 3"),
    "loss of a length that wraps": (lambda: index_loss_op(key_length=2**32 + 12), "key_length: expected 0 <= key_length <= 1048576, got 4294967308"),
    "loss local": (lambda: index_loss_op(local=-1), "local: expected a number of keys >= 0, got -1"),
    "loss sink": (lambda: index_loss_op(sink=-1), "sink: expected a number of keys >= 0, got -1"),
    "loss scale": (lambda: index_loss_op(scale=NAN), "scale"),
    "loss index_scale": (lambda: index_loss_op(index_scale=INF), "index_scale: expected a number of magnitude up to"),
    "loss softcap": (lambda: index_loss_op(softcap=-2.0), "softcap"),
    "loss in bfloat16": (lambda: index_loss_op(to_bfloat16=True), "to_bfloat16: expected False on the CPU, got True"),
    "decode query rank": (lambda: decode_op(query=Q[0]), "query: expected 4 dimensions, got .4, 10, 16"),
    "decode 17 queries": (lambda: decode_op(query=rows(2, 4, 17, 16)), "query: expected at most 16 queries a sequence, got 17"),
    "decode key dtype": (lambda: decode_op(key=K.half()), "key: expected dtype float32, got float16"),
    "decode key batch": (lambda: decode_op(key=K[:1]), "key: expected .B, Hkv, Smax, D. = .2, 2, 12, 16., got .1, 2, 12, 16"),
    "decode value": (lambda: decode_op(value=V[:, :1]), "value: expected .B, Hkv, Smax, Dv."),
    "decode heads": (lambda: decode_op(query=rows(2, 5, 1, 16)), "key: expected a number of heads that divides H=5, got Hkv=2"),
    "decode D": (lambda: decode_op(query=Q[..., :12], key=K[..., :12]), "query: expected a last dimension"),
    "decode Dv": (lambda: decode_op(value=V[..., :0]), "value: expected a last dimension"),
    "decode lengths dtype": (lambda: decode_op(lengths=LENGTHS.long()), "lengths: expected dtype int32, got int64"),
    "decode lengths": (lambda: decode_op(lengths=INTS[:3]), "lengths: expected .B. = .2., got .3."),
    "decode lengths elsewhere": (lambda: decode_op(lengths=LENGTHS.to("meta")), "expected the device of"),
    "decode table dtype": (lambda: decode_op(key=POOL, value=VALUE_POOL, page_table=TABLE.long()), "page_table: expected dtype int32"),
    "decode table": (lambda: decode_op(key=POOL, value=VALUE_POOL, page_table=TABLE[:1]), "page_table: expected .B, max_pages. with B=2, got .1, 1."),
    "decode page size": (lambda: decode_op(key=POOL[:, :8], value=VALUE_POOL[:, :8], page_table=TABLE), "key: expected pages of a multiple of 16 keys, got 8"),
    "decode pages that are not alike": (lambda: decode_op(key=POOL, value=VALUE_POOL[1:], page_table=TABLE), "value: expected .pages, page_size, Hkv, Dv."),
    "decode table of a length that wraps": (lambda: decode_op(key=POOL, value=VALUE_POOL, page_table=TABLE.expand(2, 2**32)), "page_table: expected room"),
    "decode a table too long": (lambda: decode_op(key=POOL, value=VALUE_POOL, page_table=TABLE.expand(2, 65537)), "key: expected room for up to 1048576 keys, got 1048592"),
    "decode key of a length that wraps": (lambda: decode_op(key=K[:, :, :1].expand(2, 2, 2**32 + 12, 16), value=V[:, :, :1].expand(2, 2, 2**32 + 12, 8)), "key: expected room for up to 1048576 keys, got 4294967308"),
    "decode key_bias dtype": (lambda: decode_op(key_bias=rows(2, 2, 12).half()), "key_bias: expected dtype float32, got float16"),
    "decode key_bias": (lambda: decode_op(key_bias=rows(2, 3, 12)), "key_bias: expected .B.1, H.Hkv.1, Smax. with B=2"),
    "decode lists rank": (lambda: decode_op(indices=STEP_LISTS[0]), "indices: expected .B.1, H.Hkv.1, T, K. with B=2"),
    "decode lists heads": (lambda: decode_op(indices=STEP_LISTS.expand(2, 2, -1, -1)[:, :1].expand(2, 3, -1, -1)), "indices: expected .B.1, H.Hkv.1, T, K. with B=2"),
    "decode lists queries": (lambda: decode_op(indices=STEP_LISTS[:, :, 1:]), "indices: expected .B.1, H.Hkv.1, T, K. with B=2"),
    "decode lists dtype": (lambda: decode_op(indices=STEP_LISTS.long()), "indices: expected dtype int32, got int64"),
    "decode lists block": (lambda: decode_op(indices=STEP_LISTS, index_block=3), "index_block: expected a power of two from 1 to 128, got 3"),
    "decode lists local": (lambda: decode_op(indices=STEP_LISTS, index_local=-1), "index_local: expected a number of keys, 0 or more, got -1"),
    "decode lists too long": (lambda: decode_op(indices=STEP_LISTS[..., :1].expand(2, 2, -1, 2**14), index_block=64, index_sinks=1), "indices: expected lists of up to 1048576 keys, local ones and sinks included, got 1048577"),
    "decode sinks": (lambda: decode_op(sinks=rows(2)), "sinks: expected .H. = .4., got .2."),
    "decode sinks dtype": (lambda: decode_op(sinks=rows(4).double()), "sinks: expected dtype float32, got float64"),
    "decode scale": (lambda: decode_op(scale=NAN), "scale"),
    "decode softcap": (lambda: decode_op(softcap=-2.0), "softcap"),
    "query rank": (lambda: forward(query=Q[0]), "query"),
    "key rank": (lambda: forward(key=K[0]), "key"),
    "key dtype": (lambda: forward(key=K.double()), "key"),
    "query dtype": (lambda: forward(query=Q.int(), key=K.int(), value=V.int()), "query"),
    "key heads": (lambda: forward(query=Q[:, :3]), "key"),
    "key batch": (lambda: forward(key=K[:1], value=V[:1]), "key"),
    "key size": (lambda: forward(key=K[..., :8]), "key"),
    "value length": (lambda: forward(value=V[:, :, :3]), "value"),
    "D": (lambda: forward(query=Q[..., :12], key=K[..., :12]), "query"),
    "Dv": (lambda: forward(value=V[..., :0]), "value"),
    "scale": (lambda: forward(scale=NAN), "scale"),
    "softcap": (lambda: forward(softcap=-2.0), "softcap"),
    "softcap inf": (lambda: forward(softcap=INF), "softcap"),
    "scale beyond float32": (lambda: forward(scale=1e39), "scale: expected a number of magnitude up to 1e[+]30, got 1e[+]39"),
    "scale of backward": (lambda: backward(scale=-1e39), "scale: expected a number of magnitude up to 1e[+]30, got -1e[+]39"),
    "softcap too small": (lambda: forward(softcap=1e-39), "softcap: expected 0 or a number from 1e-30 to 1e[+]30, got 1e-39"),
    "softcap denormal": (lambda: backward(softcap=5e-324), "softcap: expected 0 or a number from 1e-30 to 1e[+]30"),
    "softcap beyond float32": (lambda: forward(softcap=1e39), "softcap: expected 0 or a number from 1e-30 to 1e[+]30, got 1e[+]39"),
    "lists of rank 3": (lambda: forward(indices=LISTS[0]), "indices: expected .B.1, H.Hkv.1, Sq, K."),
    "lists of 9 queries": (lambda: forward(indices=LISTS[:, :, 1:]), "indices: expected .B.1, H.Hkv.1, Sq, K."),
    "lists dtype": (lambda: forward(indices=LISTS.long()), "indices: expected dtype int32, got int64"),
    "lists in blocks of 3": (lambda: forward(indices=LISTS, is_in_order=False, most_keys=0, index_block=3), "index_block: expected a power of two from 1 to 128, got 3"),
    "lists in blocks of 256": (lambda: forward(indices=LISTS, is_in_order=False, most_keys=0, index_block=256), "index_block: expected a power of two from 1 to 128, got 256"),
    "local of lists": (lambda: forward(indices=LISTS, is_in_order=False, most_keys=0, index_block=1, index_local=-1), "index_local: expected a number of keys"),
    "sinks of lists": (lambda: forward(indices=LISTS, is_in_order=False, most_keys=0, index_block=1, index_local=0, index_sinks=-1), "index_sinks: expected a number of keys"),
    "offset without lists": (lambda: forward(index_offset=LENGTHS), "index_offset: expected none without indices"),
    "three offsets": (lambda: forward(indices=LISTS, index_offset=INTS[:3]), "index_offset: expected .1. or .B. with B=2, got .3."),
    "start of 2^40 keys": (lambda: forward(start=WIDE), "start: expected .*, got .1, 1, 1099511627776."),
    "end of 2^40 keys": (lambda: forward(end=WIDE), "end: expected .*, got .1, 1, 1099511627776."),
    "key_bias of 2^40 keys": (lambda: forward(key_bias=WIDE.view(torch.float32)), "key_bias: expected .*, got .1, 1, 1099511627776."),
    "segments of 2^40 keys": (lambda: ops.select(S, WIDE, 3, True), "segment_end: expected .*, got .1, 1, 1099511627776."),
    "tiles of 2^40 columns": (lambda: forward(**tables(tiles=WIDE[None])), "tiles: expected .*, got .1, 1, 1, 1099511627776."),
    "more elements than there are addresses": (lambda: ops.select(torch.empty(1, 1, 0).expand(2**31, 2**31, 0), None, 3, True), "scores: expected sizes whose product is at most 2.54"),
    "key of a length that wraps": (lambda: forward(key=K[:1, :1, :1].expand(2, 2, 2**32 + 12, 16), value=V[:1, :1, :1].expand(2, 2, 2**32 + 12, 8)), "key: expected a length up to 1048576, got 4294967308"),
    "scores of a length that wraps": (lambda: ops.select(S[:, :, :1].expand(2, 2, 2**32 + 5), None, 3, True), "scores: expected a length up to 1048576, got 4294967301"),
    "pack of a length that wraps": (lambda: ops.pack_tiles(ones, 2**32 + 10, 12, 1, 1, 32, 32), "query_length: expected .*, got 4294967306"),
    "pack of a block that wraps": (lambda: ops.pack_tiles(ones, 10, 12, 1, 2**32 + 1, 32, 32), "block_k: expected .*, got 4294967297"),
    "pack of slots that wrap": (lambda: ops.pack_bits(ones, BLOCK.tiles, 10, 12, 1, 1, 128, 128, 2**32 + 1), "slots: expected .*, got 4294967297"),
    "dropout": (lambda: forward(dropout_p=1.0), "dropout_p"),
    "dropout NaN": (lambda: forward(dropout_p=NAN), "dropout_p"),
    "no seed": (lambda: forward(dropout_p=0.5), "dropout_seed"),
    "seed dtype": (lambda: forward(dropout_p=0.5, dropout_seed=INTS[:1]), "dropout_seed"),
    "seed size": (lambda: forward(dropout_p=0.5, dropout_seed=torch.zeros(0, dtype=torch.int64)), "dropout_seed"),
    "start dtype": (lambda: forward(start=INTS.long()[None, None]), "start"),
    "start rank": (lambda: forward(start=INTS), "start"),
    "end length": (lambda: forward(end=INTS[None, None, :3]), "end"),
    "end heads": (lambda: forward(end=INTS.expand(1, 3, 12)), "end"),
    "key_bias dtype": (lambda: forward(key_bias=rows(1, 1, 12, dtype=torch.float16)), "key_bias"),
    "key_bias shape": (lambda: forward(key_bias=rows(1, 1, 11)), "key_bias"),
    "bias dtype": (lambda: forward(bias=rows(1, 1, 10, 12, dtype=torch.float64)), "bias"),
    "bias of one row": (lambda: forward(bias=rows(1, 1, 1, 12)), "bias"),
    "bias rank": (lambda: forward(bias=rows(10, 12)), "bias"),
    "part of a block mask": (lambda: forward(**tables(bits=None)), "tiles, rows, columns, bits"),
    "tiles alone": (lambda: forward(tiles=BLOCK.tiles), "tiles, rows, columns, bits"),
    "tiles dtype": (lambda: forward(**tables(tiles=BLOCK.tiles.long())), "tiles"),
    "tiles shape": (lambda: forward(**tables(tiles=BLOCK.tiles[..., :1])), "tiles"),
    "rows shape": (lambda: forward(**tables(rows=BLOCK.rows[..., :1])), "rows"),
    "columns shape": (lambda: forward(**tables(columns=BLOCK.columns[..., :1])), "columns"),
    "bits rank": (lambda: forward(**tables(bits=BLOCK.bits[0:0, 0])), "bits"),
    "bits of a tile too large": (lambda: forward(**tables(bits=torch.empty(0, dtype=torch.int32).as_strided((0, 32, 2**59), (1, 1, 1)))), "bits: expected"),
    "bits tile": (lambda: forward(**tables(bits=torch.zeros(1, 33, 1, dtype=torch.int32))), "bits"),
    "grad_out shape": (lambda: backward(grad_out=rows(2, 4, 10, 16)), "grad_out"),
    "grad_out dtype": (lambda: backward(grad_out=rows(2, 4, 10, 8, dtype=torch.float64)), "grad_out"),
    "out shape": (lambda: backward(out=rows(2, 4, 9, 8)), "out"),
    "lse dtype": (lambda: backward(lse=rows(2, 4, 10, dtype=torch.float64)), "lse"),
    "lse shape": (lambda: backward(lse=rows(2, 4, 11)), "lse"),
    "grad_lse shape": (lambda: backward(grad_lse=rows(2, 4, 11)), "grad_lse"),
    "grad_lse empty": (lambda: backward(grad_lse=rows(0)), "grad_lse"),
    "lse_rest shape": (lambda: backward(lse_rest=rows(2, 4, 11)), "lse_rest"),
    "lse_rest dtype": (lambda: backward(lse_rest=rows(2, 4, 10, dtype=torch.float64)), "lse_rest"),
    "gradient of no key_bias": (lambda: backward(need_key_bias=True), "need_key_bias"),
    "gradient of no bias": (lambda: backward(need_bias=True), "need_bias"),
    "scores rank": (lambda: ops.select(S[0], None, 3, True), "scores"),
    "scores dtype": (lambda: ops.select(S.int(), None, 3, True), "scores"),
    "scores too long": (lambda: ops.select(S[:1, :1, :1].expand(1, 1, 2**20 + 1), None, 3, True), "scores: expected a length up to 1048576"),
    "window 0": (lambda: ops.select(S, None, 0, True), "window"),
    "window -1": (lambda: ops.select(S, None, -1, True, 2, 0), "window"),
    "local -1": (lambda: ops.select(S, None, 3, True, -1, 0), "local"),
    "sink -1": (lambda: ops.select(S, None, 3, True, 0, -1), "sink"),
    "local not causal": (lambda: ops.select(S, None, 3, False, 1, 0), "local, sink"),
    "sink not causal": (lambda: ops.select(S, None, 3, False, 0, 1), "local, sink"),
    "segment dtype": (lambda: ops.select(S, INTS.long()[None, None], 3, True), "segment_end"),
    "segment elsewhere": (lambda: ops.select(S, INTS[None, None].to("meta"), 3, True), "expected the device of scores"),
    "segment shape": (lambda: ops.select(S, INTS[None], 3, True), "segment_end"),
    "index query rank": (lambda: indexed(index_query=rows(2, 2, 10, 8)), "index_query"),
    "index query heads": (lambda: indexed(index_query=rows(2, 2, 10, 0, 8), weights=rows(2, 2, 10, 0)), "index_query"),
    "index query 129 heads": (lambda: indexed(index_query=rows(2, 2, 10, 129, 8), weights=rows(2, 2, 10, 129)), "index_query: expected 1 to 128 heads"),
    "index query width": (lambda: indexed(index_query=rows(2, 2, 10, 3, 12), index_key=rows(2, 2, 12, 12)), "index_query"),
    "index key shape": (lambda: indexed(index_key=rows(2, 2, 11, 8)), "index_key"),
    "index key dtype": (lambda: indexed(index_key=rows(2, 2, 12, 8, dtype=torch.float64)), "index_key"),
    "index weights shape": (lambda: indexed(weights=rows(2, 2, 10, 2)), "weights"),
    "index weights dtype": (lambda: indexed(weights=rows(2, 2, 10, 3, dtype=torch.bfloat16)), "weights"),
    "index slope shape": (lambda: indexed(slope=rows(3)), "slope"),
    "index start shape": (lambda: indexed(start=torch.zeros(2, 2, 11, dtype=torch.int32)), "start"),
    "index lengths dtype": (lambda: indexed(lengths=torch.zeros(2)), "lengths"),
    "index offset shape": (lambda: indexed(query_offset=torch.zeros(3, dtype=torch.int32)), "query_offset"),
    "index k": (lambda: indexed(k=-1), "k"),
    "index block": (lambda: indexed(block_size=3), "block_size"),
    "index local": (lambda: indexed(local=-1), "local"),
    "index sink": (lambda: indexed(sink=-1), "sink"),
    "index key_length": (lambda: indexed(key_length=2**20 + 1), "key_length"),
    "index scale": (lambda: indexed(scale=float("nan")), "scale"),
    "pack rank": (lambda: ops.pack_tiles(ones[0], 10, 12, 1, 1, 32, 32), "mask"),
    "pack dtype": (lambda: ops.pack_tiles(ones.int(), 10, 12, 1, 1, 32, 32), "mask"),
    "pack lengths": (lambda: ops.pack_tiles(ones, 10, 13, 1, 1, 32, 32), "mask"),
    "pack negative": (lambda: ops.pack_tiles(ones, -1, 12, 1, 1, 32, 32), "query_length"),
    "pack block 0": (lambda: ops.pack_tiles(ones, 10, 12, 0, 1, 32, 32), "block_q"),
    "pack tile 33": (lambda: ops.pack_tiles(ones, 10, 12, 1, 1, 33, 32), "tile_q"),
    "pack tile 0": (lambda: ops.pack_tiles(ones, 10, 12, 1, 1, 32, 0), "tile_k"),
    "pack slots": (lambda: ops.pack_bits(ones, BLOCK.tiles, 10, 12, 1, 1, 128, 128, -1), "slots"),
    "pack tiles": (lambda: ops.pack_bits(ones, BLOCK.tiles[..., :1], 10, 12, 1, 1, 128, 128, 1), "tiles"),
}  # fmt: skip


@pytest.mark.brief
@pytest.mark.parametrize(("call", "argument"), DIRECT.values(), ids=DIRECT)
def test_direct_op_call(call, argument):
    with pytest.raises(RuntimeError, match=rf"dmattn: .*{argument}"):
        call()


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "start"])
def test_two_devices_in_one_op_call(name):
    given = {"query": Q, "key": K, "value": V, "bias": rows(1, 1, 10, 12), "start": INTS[None, None]}[name]
    with pytest.raises(RuntimeError, match=r"dmattn: .*: expected the device of"):
        forward(**{name: given.to("meta")})


@pytest.mark.parametrize("entry", [-(2**31), -1, 3, 1000, 2**31 - 1])
@pytest.mark.parametrize("which", ["tiles", "rows", "columns"])
def test_a_corrupt_table_reads_nothing_out_of_bounds(which, entry):
    """Wrong results are fine, wrong accesses are not: the sanitizer build runs this too."""
    visible = torch.rand(1, 1, 200, 200, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = BlockMask.from_bool(visible, 64)
    given = {name: getattr(mask, name).clone() for name in ("tiles", "rows", "columns", "bits")}
    given[which].fill_(entry)
    query = rows(1, 1, 200, 16)
    out, lse, _ = forward(query=query, key=query, value=query, **given)
    assert out.shape == query.shape
    gradients = backward(grad_out=out, query=query, key=query, value=query, out=out, lse=lse, **given)
    assert gradients[0].shape == query.shape


@pytest.mark.parametrize("extreme", [-(2**31), 2**31 - 1, -1, 0])
def test_extreme_intervals_are_only_intervals(extreme):
    bound = torch.full((1, 1, 12), extreme, dtype=torch.int32)
    for given in ({"start": bound}, {"end": bound}, {"start": bound, "end": bound}):
        out, lse, _ = forward(**given)
        assert not out.isnan().any()
        assert not lse.isnan().any()


# Anything for any argument ----------------------------------------------------------------------------------------------------------

LAYER = DynamicMaskAttention(32, 4, 4)
ARGUMENTS = {
    dmattn.attention: {"query": Q, "key": K, "value": V, "mask": None, "key_bias": None, "bias": None, "is_causal": False, "scale": None,
                       "softcap": 0.0, "dropout_p": 0.0, "dropout_seed": None, "deterministic": False, "sinks": None, "query_offset": None, "return_lse": False},
    dmattn.dynamic_mask_attention: {"query": Q, "key": K, "value": V, "scores": S, "window": 3, "is_causal": True, "base": None, "local": 0,
                                    "sink_keys": 0, "scale": None,
                                    "softcap": 0.0, "dropout_p": 0.0, "dropout_seed": None, "deterministic": False, "sinks": None,
                                    "query_offset": None, "return_lse": False},
    dmattn.attention_weights: {"query": Q, "key": K, "mask": None, "lse": None, "heads": None, "rows": None, "key_bias": None, "bias": None,
                               "is_causal": False, "scale": None, "softcap": 0.0, "sinks": None, "query_offset": None},
    dmattn.lse_with_sink: {"lse": rows(2, 4, 10), "sinks": rows(4)},
    dmattn.decode_attention: {"query": Q, "key_cache": K, "value_cache": V, "lengths": LENGTHS, "key_bias": None, "page_table": None,
                              "sinks": None, "scale": None, "softcap": 0.0, "return_lse": False},
    dmattn.key_scores: {"value": V, "dt_proj": rows(2, 16), "A": rows(2), "dt_proj_bias": None},
    dmattn.flash_dynamic_mask_attention: {"q": Q, "k": K, "v": V, "attn_mask": None, "bias": None, "softcap": None, "causal": False,
                                          "return_lse": False, "enable_skip": True},
    dmattn.flash_dma_attention: {"query": Q.transpose(1, 2), "key": K.transpose(1, 2), "value": V.transpose(1, 2), "dt_proj": rows(2, 16),
                                 "a_coef": rows(2), "keep_window_size": 3, "dropout_p": 0.0, "causal": False, "softmax_scale": None,
                                 "return_attn_probs": False},
    dmattn.index_top_k: {"index_query": IQ, "index_key": IK, "weights": IW, "k": 3, "block_size": 1, "block_score": "max", "is_causal": True,
                         "base": None, "local": 0, "sink_keys": 0, "scale": None, "slope": None, "query_offset": None, "lengths": None,
                         "page_table": None, "return_scores": False},
    dmattn.index_scores: {"index_query": IQ, "index_key": IK, "weights": IW, "scale": None, "slope": None, "activation": "relu", "rows": None},
    dmattn.index_loss: {"index_query": IQ, "index_key": IK, "weights": IW, "query": QK[0], "key": QK[1], "rows": None, "mask": None,
                        "is_causal": True, "base": None, "local": 0, "sink_keys": 0, "scale": None, "softcap": 0.0, "key_bias": None,
                        "block_size": 1, "block_score": "max", "slope": None, "query_offset": None, "sharp": False},
    dmattn.visible_pairs: {"mask": None, "Sq": 4, "Sk": 5, "is_causal": False, "batch": 1, "heads": 1},
    DynamicMaskAttention: {"embed_dim": 32, "num_heads": 4, "window": 4, "num_kv_heads": None, "head_dim": None, "bias": False, "dropout": 0.0,
                           "rope_theta": 1e4, "is_causal": True, "local": 0, "sink_keys": 0, "recipe": None},
    ScoreRecipe: {"score": "exp", "select_only": False, "recency": None, "local_heads": 0, "rotated_heads": None, "queries": 64, "last": 0.0,
                  "sharp": False, "explore": False},
    LAYER: {"hidden_states": rows(1, 6, 32), "base": None, "window": None, "with_score_loss": False},
    score_loss: {"query": Q, "key": Q[:, :2], "scores": rows(2, 2, 10), "key_bias": None, "base": None, "local": 0, "sink_keys": 0, "queries": 4,
                 "last": 0.0, "sharp": False, "scale": None, "softcap": 0.0},
    WindowSchedule: {"window": 2, "length": 20, "dense_steps": 0, "fall_steps": 0, "multiple": 64},
}  # fmt: skip
# What each argument takes of the strange things.
TAKEN = {
    "mask": {"None", "a block mask"}, "page_table": {"None"}, "key_bias": {"None"}, "bias": {"None"}, (DynamicMaskAttention, "bias"): {"a bool"}, "scale": {"None", "an int", "a float"},
    "softmax_scale": {"None", "an int", "a float"}, "softcap": {"None", "an int", "a float"}, "sinks": {"None"}, (dmattn.lse_with_sink, "sinks"): set(),
    "query_offset": {"None", "an int", "an int in a tensor"}, "lse": {"None"}, (dmattn.lse_with_sink, "lse"): set(),
    (dmattn.attention_weights, "heads"): {"None", "an int", "an int in a tensor"}, "rows": {"None", "an int", "an int in a tensor"},
    "dropout_seed": {"None", "an int in a tensor"}, "base": {"None"}, "window": {"an int"}, (LAYER, "window"): {"None", "an int"}, "score": {"a module"}, "recency": {"None", "an int", "a float"},
    "queries": {"an int"}, "local_heads": {"an int"}, "recipe": {"None"}, "length": {"an int"}, "dense_steps": {"an int"}, "fall_steps": {"an int"}, "multiple": {"an int"}, "local": {"an int"}, "sink_keys": {"an int"}, "keep_window_size": {"an int"},
    "dt_proj": {"a module"}, "dt_proj_bias": {"None"}, "attn_mask": {"None"}, "Sq": {"an int"}, "Sk": {"an int"}, "batch": {"an int"},
    "heads": {"an int"}, "num_kv_heads": {"None"}, "head_dim": {"None"}, "rope_theta": {"None", "an int", "a float"},
    "rotated_heads": {"None", "an int"}, "k": {"an int"}, "block_size": {"an int"}, "slope": {"None"}, "lengths": {"None"},
    (dmattn.decode_attention, "lengths"): set(), "return_scores": {"a bool"},
    **{(function, name): {"None"} for function in (dmattn.index_scores, dmattn.index_loss) for name in ("rows", "mask")},
    (dmattn.index_loss, "query_offset"): {"None", "an int"},
} | {name: {"a bool"} for name in ("is_causal", "causal", "select_only", "explore", "sharp", "with_score_loss", "deterministic", "return_lse", "return_attn_probs", "enable_skip")}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "argument"),
    [(function, argument) for function, arguments in ARGUMENTS.items() for argument in arguments],
    ids=lambda given: given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__),
)
def test_anything_for_any_argument(function, argument):
    """It is taken by the arguments that say so, or refused with TypeError or ValueError, and the message opens with an argument's name."""
    names = [*ARGUMENTS[function], "query", "key", "value", "mask", "base.start", "mask.start", "query, key"]
    taken = TAKEN.get((function, argument), TAKEN.get(argument, ()))
    assert_taken_or_refused(function, ARGUMENTS[function], argument, names, taken)
