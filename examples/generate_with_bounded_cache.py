"""Generates with a converted Llama and a bounded cache: memory and time a token over the context, vs. the full cache. Half a minute.

The weights are random: what a step costs does not depend on them. The plot needs matplotlib; without it there are
the numbers alone.

pip install . transformers        # in a checkout of dmattn
python examples/generate_with_bounded_cache.py --output cost.png
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from cost import Cost, seconds_of
from dmattn.integrations.transformers import bounded_cache, convert
from tiny_transformers import SEED, arguments, sizes, text
from torch import Tensor

try:
    from plots import plot_cost
except ImportError:  # no matplotlib
    plot_cost = None

CHUNK = 2048


def main(given: list[str] | None = None) -> list[Cost]:
    """Returns what a token costs after contexts of several lengths."""
    options = arguments(__doc__, given, output="")
    contexts = (128, 256, 512) if options.quick else (1024, 2048, 4096, 8192, 16384)
    window, local = (32, 16) if options.quick else (512, 128)
    torch.manual_seed(SEED)
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes(options.quick))).eval()
    dense.set_attn_implementation("sdpa")
    model = convert(transformers.LlamaForCausalLM(dense.config).eval(), window, local=local, sink_keys=4)
    _, data = text()
    tokens = data.repeat(-(-max(contexts) // len(data)))[None].long()
    caches = {"bounded": bounded_cache(model, rewind=0), "growing": transformers.DynamicCache(config=dense.config)}

    print(" context   memory: bounded      full   time a token: bounded     full")
    rows, read = [], 0
    for context in contexts:
        for first in range(read, context, CHUNK):
            part = tokens[:, first : min(first + CHUNK, context)]
            step(model, part, caches["bounded"])
            grow(caches["growing"], dense.config, part.shape[1])
        read = context
        row = Cost(
            context, nbytes(caches["bounded"]), nbytes(caches["growing"]),
            seconds_of(lambda: step(model, tokens[:, :1], caches["bounded"]), 15),
            seconds_of(lambda: step(dense, tokens[:, :1], caches["growing"]), 15),
        )  # fmt: skip
        # The steps that were timed added some tokens.
        caches["growing"].crop(context - caches["growing"].get_seq_length())
        rows.append(row)
        print(
            f"{row.context:8,} {row.bounded_bytes / 2**20:13.1f} MB {row.growing_bytes / 2**20:6.1f} MB {row.bounded_seconds * 1e3:18.1f} ms "
            f"{row.growing_seconds * 1e3:5.1f} ms",
            flush=True,
        )
    if options.output and plot_cost is not None:
        plot_cost(Path(options.output), rows)
        print(f"{options.output} has the picture")
    elif options.output:
        print("no picture: matplotlib is not installed")
    return rows


@torch.no_grad()
def step(model: transformers.PreTrainedModel, tokens: Tensor, cache: transformers.Cache) -> Tensor:
    """The logits of the last token, after which the cache has all of them."""
    logits: Tensor = model(input_ids=tokens, past_key_values=cache, logits_to_keep=1).logits
    return logits


def grow(cache: transformers.DynamicCache, config: transformers.PreTrainedConfig, count: int) -> None:
    """Random numbers for so many tokens: reading a long text with dense attention takes long, and what a cache holds changes no step's time."""
    for layer in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, count, config.head_dim)
        cache.update(torch.randn(shape), torch.randn(shape), layer)


def nbytes(cache: transformers.Cache) -> int:
    """Bytes of all that a cache holds."""
    return sum(
        layer.keys.nbytes + layer.values.nbytes if layer.keys is not None else layer.cache.nbytes for layer in cache.layers
    )


if __name__ == "__main__":
    main()
