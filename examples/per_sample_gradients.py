"""Gradients of each sample at once, by torch.func: checked against a loop, and used to train with clipped, noisy gradients (DP-SGD). Seconds.

python examples/per_sample_gradients.py
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from dmattn import IntervalMask
from dmattn.nn import DynamicMaskAttention
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

VOCABULARY, LENGTH, WIDTH = 32, 64, 32


class Model(nn.Module):
    """tokens [B, S] -> logits [B, S, VOCABULARY] of the token that follows each; every query sees its 8 best keys and its 4 latest."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = DynamicMaskAttention(WIDTH, 4, window=8, local=4)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, mask: IntervalMask) -> Tensor:
        return self.head(self.attention(self.embedding(tokens), base=mask))


def loss_of(parameters: dict[str, Tensor], model: Model, tokens: Tensor, mask: IntervalMask) -> Tensor:
    """Mean loss of one sequence: tokens [S], and the mask of its padding."""
    logits = functional_call(model, parameters, (tokens[None], mask))[0, :-1]
    return F.cross_entropy(logits, tokens[1:], ignore_index=0)


def gradients_of_each(
    model: Model, parameters: dict[str, Tensor], tokens: Tensor, lengths: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """(gradients with the batch in front, losses [B]) of tokens [B, S]. One pass, whatever B."""

    def of_one(parameters: dict[str, Tensor], tokens: Tensor, length: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return grad_and_value(loss_of)(parameters, model, tokens, IntervalMask.padding(LENGTH, length[None]))

    return vmap(of_one, in_dims=(None, 0, 0))(parameters, tokens, lengths)


def clipped_mean(gradients: dict[str, Tensor], most: float, noise: float, generator: torch.Generator) -> dict[str, Tensor]:
    """The mean of gradients that are scaled down to a norm of ``most`` each, with Gaussian noise (Abadi et al., arXiv 1607.00133)."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients.values()]).norm(dim=0)  # [B]
    factors = (most / norms).clamp(max=1.0)
    means = {}
    for name, gradient in gradients.items():
        clipped = torch.einsum("b,b...->...", factors, gradient)
        means[name] = (clipped + noise * most * torch.randn(clipped.shape, generator=generator)) / len(norms)
    return means


def batch(step: int, count: int) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards and end in padding (0): tokens [count, LENGTH], lengths [count]."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY - 1, (count, 1), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=generator)
    tokens = (start + torch.arange(LENGTH)) % (VOCABULARY - 1) + 1
    return tokens.masked_fill(torch.arange(LENGTH) >= lengths[:, None], 0), lengths


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Compares with a loop, then trains. Returns the first and the last loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--quick", dest="steps", action="store_const", const=5, help="--steps 5: does it run")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Model()
    model.attention.A.data.normal_()  # so that scores differ, as they do after some training
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    tokens, lengths = batch(0, given.batch)
    gradients_of_each(model, parameters, tokens, lengths)  # the first call prepares
    began = time.perf_counter()
    gradients, _ = gradients_of_each(model, parameters, tokens, lengths)
    together = time.perf_counter() - began
    began = time.perf_counter()
    loop = []
    for sample in range(given.batch):
        model.zero_grad()
        mask = IntervalMask.padding(LENGTH, lengths[sample : sample + 1])
        loss_of(dict(model.named_parameters()), model, tokens[sample], mask).backward()
        loop.append({name: parameter.grad for name, parameter in model.named_parameters()})
    alone = time.perf_counter() - began
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, torch.stack([of_one[name] for of_one in loop]))
    print(f"{given.batch} samples: {1e3 * together:.0f} ms together, {1e3 * alone:.0f} ms in a loop, the same gradients")

    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(given.steps):
        gradients, each = gradients_of_each(model, parameters, *batch(step, given.batch))
        step_by = clipped_mean(gradients, most=1.0, noise=0.05, generator=generator)
        parameters = {name: parameter - 1.5 * step_by[name] for name, parameter in parameters.items()}
        losses.append(float(each.mean()))
    print(f"clipped and noisy: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {given.steps} steps")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
