"""What generation with a layer and a cache gives, beside the call over the whole history."""

from __future__ import annotations

import torch
import torch._dynamo.testing
import torch.nn.functional as F
from dmattn_bench import two_ways


def convolved(layer, hidden):
    """What an IndexedAttention makes of one document's hidden states [B, S, E] first, by torch's convolution."""
    size, channels = layer.recipe.conv, hidden.shape[2]
    if size == 1:
        return hidden
    taps = torch.cat((layer.conv.weight.flip(0), torch.ones_like(layer.conv.weight[:1])))  # the row itself last
    return F.conv1d(F.pad(hidden.transpose(1, 2), (size - 1, 0)), taps.T[:, None], groups=channels).transpose(1, 2)


def assert_prompts_generate(layer, hidden, cache, side):
    """Prompts of 20, 3 and 11 tokens in one call, padded with NaN, and a step: each sequence has what it has alone."""
    lengths, pad = [20, 3, 11], torch.full_like(hidden[0, :20], torch.nan)
    prompts = [torch.cat([x[:n], pad[n:]] if side == "right" else [pad[n:], x[:n]]) for x, n in zip(hidden, lengths, strict=True)]
    with torch.no_grad():
        out = layer(torch.stack(prompts), cache=cache, lengths=torch.tensor(lengths, dtype=torch.int32), padding_side=side)
        step = layer(torch.stack([x[n : n + 1] for x, n in zip(hidden, lengths, strict=True)]), cache=cache)
        for b, n in enumerate(lengths):
            ours = torch.cat([out[b, :n] if side == "right" else out[b, 20 - n :], step[b]])
            two_ways.assert_same_in_another_order(ours, layer(hidden[b : b + 1, : n + 1])[0], hidden.dtype)
    assert cache.length.tolist() == [n + 1 for n in lengths]


def assert_rewinds_and_reorders(layer, hidden, cache, wrong):
    """Wrong tokens are taken back, two sequences change places, and one of them leaves."""
    with torch.no_grad():
        layer(hidden[:, :25], cache=cache)
        layer(wrong, cache=cache)
        cache.rewind(3)
        cache.rewind(torch.tensor([1, 1], dtype=torch.int32))
        cache.reorder(torch.tensor([1, 0]))
        assert cache.length.tolist() == [25, 25]
        out = layer(hidden.flip(0)[:, 25:], cache=cache)
        two_ways.assert_same_in_another_order(out, layer(hidden).flip(0)[:, 25:], hidden.dtype)
        cache.reset([1])
    assert cache.length.tolist() == [hidden.shape[1], 0]


def assert_step_compiles_once(layer, hidden, cache):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda token: layer(token, cache=cache), fullgraph=True, backend=counter)
    with torch.no_grad():
        outs = [step(hidden[:, p : p + 1]) for p in range(20)]
        two_ways.assert_same_in_another_order(torch.cat(outs, 1), layer(hidden[:, :20]), hidden.dtype)
    assert counter.frame_count == 1
