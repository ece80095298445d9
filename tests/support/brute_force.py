"""Attention, its gradients, key selection and dropout from their definitions, in float64 with numpy.

It states docs/semantics.md a second time and shares no code with the package: not with dmattn.reference, not with dmattn.testing. Whole
[B, H, Sq, Sk] matrices are built; gradients are written out, not derived by autograd.
"""

from __future__ import annotations

import dataclasses

import numpy as np

INFINITY = float("inf")


# Who sees whom ----------------------------------------------------------------------------------------------------------------------


def by_query_head(given, batch, heads):
    """[B|1, H|Hkv|1, ...] to [B, H, ...]: query head h of H reads row h * rows // H."""
    rows = given.shape[1]
    given = given[:, [h * rows // heads for h in range(heads)]]
    return np.broadcast_to(given, (batch, *given.shape[1:]))


def summed_to(shape, gradient):
    """The transpose of by_query_head and of broadcasting: a [B, H, ...] gradient added up into the shape of what was given."""
    batch, heads = gradient.shape[:2]
    total = np.zeros((batch, shape[1], *gradient.shape[2:]))
    for h in range(heads):
        total[:, h * shape[1] // heads] += gradient[:, h]
    for axis, size in enumerate(shape):
        if size == 1 and total.shape[axis] != 1:
            total = total.sum(axis=axis, keepdims=True)
    return total


def visibility(batch, heads, queries, keys, start=None, end=None, block=None, is_causal=False, first=None, lists=None):
    """bool [B, H, Sq, Sk]. start and end: integers [B|1, H|Hkv|1, Sk]; block: bool [B|1, H|Hkv|1, Sq|1, Sk|1]; first: position of the first
    query, integers [B|1], by default such that the last query stands at the last key; lists: integers [B|1, H|Hkv|1, Sq, K], the keys of one
    entry, those of the local window, and sinks."""
    first = np.array([keys - queries] if first is None else first)
    position = first[:, None, None, None] + np.arange(queries)[:, None]
    visible = np.ones((batch, heads, queries, keys), dtype=bool)
    if start is not None:
        visible &= by_query_head(start, batch, heads)[:, :, None, :] <= position
    if end is not None:
        visible &= position < by_query_head(end, batch, heads)[:, :, None, :]
    if block is not None:
        visible &= by_query_head(block, batch, heads)
    if lists is not None:
        entries, size, local, sinks = lists
        listed, key = np.zeros((*entries.shape[:3], keys), dtype=bool), np.arange(keys)
        for entry in np.moveaxis(entries, 3, 0):
            listed |= entry[..., None] == key // size
        visible &= by_query_head(listed, batch, heads) | ((position - local < key) & (key <= position)) | (key < sinks)
    if is_causal:
        visible &= np.arange(keys) <= position
    return visible


# Dropout ----------------------------------------------------------------------------------------------------------------------------


def mix32(x, last=True):
    """The finaliser with the constants 0x7feb352d and 0x846ca68b, with its last step or without it, on 32-bit words held in uint64."""
    word = np.uint64(0xFFFFFFFF)
    x = x ^ (x >> np.uint64(16))
    x = (x * np.uint64(0x7FEB352D)) & word
    x = x ^ (x >> np.uint64(15))
    x = (x * np.uint64(0x846CA68B)) & word
    return x ^ (x >> np.uint64(16)) if last else x


def dropout_keeps(seed, p, batch, heads, queries, keys):
    """bool [B, H, Sq, Sk]: which weights stay. seed: any int64."""
    word = np.uint64(0xFFFFFFFF)

    def wrapped(x):
        return x & word

    seed %= 1 << 64
    low, high = np.array([seed % (1 << 32)], np.uint64), np.uint64(seed >> 32)
    head, query = np.arange(batch * heads, dtype=np.uint64), np.arange(queries, dtype=np.uint64)
    row_key = mix32(mix32(low ^ np.uint64(0x9E3779B9)) ^ high)
    row_key = mix32(row_key ^ mix32(wrapped(head + np.uint64(0x85EBCA6B))))
    row_key = mix32(row_key[:, None] ^ mix32(wrapped(query + np.uint64(0xC2B2AE35))))
    column = wrapped(np.arange(keys, dtype=np.uint64) * np.uint64(0x9E3779B9))
    hashed = mix32(row_key[:, :, None] ^ column, last=False)
    threshold = min(int(p * 2.0**32), 2**32 - 1)
    return (hashed >= np.uint64(threshold)).reshape(batch, heads, queries, keys)


# Attention --------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Problem:
    """Arguments in numpy float64; visible from visibility(). rounds: the dtype each logit is rounded to after every step, None for none."""

    query: np.ndarray  # [B, H, Sq, D]
    key: np.ndarray  # [B, Hkv, Sk, D]
    value: np.ndarray  # [B, Hkv, Sk, Dv]
    visible: np.ndarray  # bool [B, H, Sq, Sk]
    key_bias: np.ndarray | None = None  # [B|1, H|Hkv|1, Sk]
    bias: np.ndarray | None = None  # [B|1, H|Hkv|1, Sq|1, Sk|1]
    scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_seed: int = 0
    rounds: type | None = None


@dataclasses.dataclass
class Weights:
    """What the softmax of a problem is made of, all [B, H, Sq, ...]."""

    query: np.ndarray  # [.., D]: rows that see nothing are 0
    key: np.ndarray  # [.., Sk, D] by query head; keys that no query of the head sees are 0
    value: np.ndarray  # [.., Sk, Dv], likewise
    slope: np.ndarray | float  # derivative of the softcap
    logit: np.ndarray  # -inf where hidden
    weight: np.ndarray  # softmax over what is visible
    kept: np.ndarray | float  # 0 or 1 / (1 - p)
    lse: np.ndarray  # [B, H, Sq]


def weights_of(problem):
    """Logits, then their softmax, then dropout's choice."""
    batch, heads, queries, _ = problem.query.shape
    keys = problem.key.shape[2]
    visible = problem.visible
    if problem.key_bias is not None:
        key_bias = by_query_head(problem.key_bias, batch, heads)
        visible = visible & (key_bias != -INFINITY)[:, :, None, :]
    if problem.bias is not None:
        bias = by_query_head(problem.bias, batch, heads)
        visible = visible & (bias != -INFINITY)
    seen = visible.any(axis=2)[..., None]
    sees = visible.any(axis=3)[..., None]
    query = np.where(sees, problem.query, 0.0)
    key = np.where(seen, by_query_head(problem.key, batch, heads), 0.0)
    value = np.where(seen, by_query_head(problem.value, batch, heads), 0.0)

    def rounded(x):
        if problem.rounds is None:
            return x
        with np.errstate(over="ignore"):
            return x.astype(problem.rounds).astype(np.float64)

    logit = rounded(problem.scale * (query @ key.swapaxes(2, 3)))
    slope = 1.0
    if problem.softcap > 0:
        squashed = np.tanh(logit / problem.softcap)
        slope = 1.0 - squashed**2
        logit = rounded(problem.softcap * squashed)
    if problem.key_bias is not None:
        logit = rounded(logit + np.where(key_bias == -INFINITY, 0.0, key_bias)[:, :, None, :])
    if problem.bias is not None:
        logit = rounded(logit + np.where(bias == -INFINITY, 0.0, bias))
    logit = np.where(visible, logit, -INFINITY)

    largest = logit.max(axis=3, keepdims=True, initial=-INFINITY)
    largest = np.where(sees, largest, 0.0)
    exponential = np.exp(logit - largest)
    total = exponential.sum(axis=3, keepdims=True)
    weight = exponential / np.where(sees, total, 1.0)
    lse = np.where(sees, largest + np.log(np.where(sees, total, 1.0)), -INFINITY)[..., 0]
    kept = 1.0
    if problem.dropout_p > 0:
        keeps = dropout_keeps(problem.dropout_seed, problem.dropout_p, batch, heads, queries, keys)
        kept = keeps / (1.0 - problem.dropout_p)
    return Weights(query, key, value, slope, logit, weight, kept, lse)


def forward(problem):
    """(out [B, H, Sq, Dv], lse [B, H, Sq])."""
    w = weights_of(problem)
    return (w.weight * w.kept) @ w.value, w.lse


def backward(problem, grad_out, grad_lse):
    """Gradients by name for grad_out [B, H, Sq, Dv] and grad_lse [B, H, Sq]; biases that were not given have none."""
    w = weights_of(problem)
    sees = (w.lse > -INFINITY)[..., None]
    grad_out = np.where(sees, grad_out, 0.0)
    grad_lse = np.where(sees, grad_lse[..., None], 0.0)
    grad_weight = (grad_out @ w.value.swapaxes(2, 3)) * w.kept
    mean = (w.weight * grad_weight).sum(axis=3, keepdims=True)
    grad_logit = w.weight * (grad_weight - mean) + w.weight * grad_lse
    grad_product = grad_logit * w.slope * problem.scale
    gradients = {
        "grad_query": grad_product @ w.key,
        "grad_key": summed_to(problem.key.shape, grad_product.swapaxes(2, 3) @ w.query),
        "grad_value": summed_to(problem.value.shape, (w.weight * w.kept).swapaxes(2, 3) @ grad_out),
    }
    if problem.key_bias is not None:
        gradients["grad_key_bias"] = summed_to(problem.key_bias.shape, grad_logit.sum(axis=2))
    if problem.bias is not None:
        gradients["grad_bias"] = summed_to(problem.bias.shape, grad_logit)
    return gradients


# Selection and packing --------------------------------------------------------------------------------------------------------------


def selected(scores, window, is_causal, base=None, local=0, sink_keys=0):
    """bool [B, Hkv, Sk, Sk]: the keys that the query at each position sees.

    scores: [B, Hkv, Sk]. base: bool [B|1, Hkv|1, Sk, Sk], among which keys the query selects. The best are the largest, among equals the
    latest; NaN and -inf are none. Beside them a query sees the first `sink_keys` keys that it may see at all and those of its last `local`
    positions, whatever their scores; these compete with nobody.
    """
    batch, heads, length = scores.shape
    chosen = np.zeros((batch, heads, length, length), dtype=bool)
    may_see = np.ones((1, 1, length, length), dtype=bool) if base is None else base
    may_see = np.tril(may_see) if is_causal else may_see
    may_see = np.broadcast_to(may_see, chosen.shape)
    for b in range(batch):
        for h in range(heads):
            row = scores[b, h]
            best_first = sorted((j for j in range(length) if row[j] > -INFINITY), key=lambda j: (row[j], j), reverse=True)
            always = np.zeros((length, length), dtype=bool)
            for p in range(length):
                seen = np.flatnonzero(may_see[b, h, p])
                always[p, seen[:sink_keys]] = True
                always[p, seen[(seen > p - local) & (seen <= p)]] = True
            candidates = (may_see[b, h] & ~always)[:, best_first]
            chosen[b, h][:, best_first] = candidates & (np.cumsum(candidates, axis=1) <= window)
            chosen[b, h] |= always
    return chosen


def unpacked(tiles, bits, queries, keys):
    """bool [.., Sq, Sk] of a table of tiles (0 empty, 1 full, 2 + slot) and bits [slots, tile_q, tile_k / 32]."""
    tile_q, tile_k = bits.shape[1], bits.shape[2] * 32
    batch, heads, tiles_q, tiles_k = tiles.shape
    whole = np.zeros((batch, heads, tiles_q * tile_q, tiles_k * tile_k), dtype=bool)
    for b, h, row, column in np.argwhere(tiles != 0):
        entry = tiles[b, h, row, column]
        where = (b, h, slice(row * tile_q, (row + 1) * tile_q), slice(column * tile_k, (column + 1) * tile_k))
        if entry == 1:
            whole[where] = True
        else:
            words = bits[entry - 2].astype(np.uint32)
            for j in range(tile_k):
                whole[where][:, j] = (words[:, j // 32] >> np.uint32(j % 32)) & np.uint32(1)
    return whole[:, :, :queries, :keys]
