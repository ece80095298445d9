"""Trains with Hugging Face accelerate: masks travel with the batch, gradients accumulate, the state is saved and found again. Seconds on a CPU.

pip install accelerate
python examples/with_accelerate.py              # or: accelerate launch examples/with_accelerate.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from dmattn import IntervalMask, attention
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LENGTH, WIDTH, HEADS, CLASSES = 96, 32, 4, 8


class Sequences(Dataset):
    """Sequences of different lengths: (tokens [LENGTH], padded; a mask of the real ones; the token that most of them are)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, IntervalMask, int]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=generator))
        tokens = torch.zeros(LENGTH, dtype=torch.int64)
        tokens[:length] = torch.randint(1, CLASSES, (length,), generator=generator)
        favourite = int(torch.randint(1, CLASSES, (), generator=generator))
        tokens[:length][torch.rand(length, generator=generator) < 0.2] = favourite
        return tokens, IntervalMask.padding(LENGTH, length), favourite


class Counter(nn.Module):
    """Reads tokens [B, S], looks at the real ones by masked attention, and says which there are most of: logits [B, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, mask: IntervalMask) -> Tensor:
        hidden = self.embedding(tokens)
        query, key, value = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = attention(query, key, value, mask).transpose(1, 2).flatten(2)
        return self.head(seen[:, 0])


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Trains, saves, restores. Returns the mean loss of the first and of the last epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--count", type=int, default=128, help="sequences in an epoch")
    parser.add_argument("--quick", dest="count", action="store_const", const=32, help="--count 32: does it run")
    given = parser.parse_args(arguments)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = Counter()
    loader = DataLoader(Sequences(given.count), batch_size=16)  # stacks the masks of the samples
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    epochs = []
    for epoch in range(given.epochs):
        losses = []
        for tokens, mask, favourite in loader:  # the mask is on the accelerator's device, as the tensors are
            assert mask.device == tokens.device == accelerator.device
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(tokens, mask), favourite)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean())
        epochs.append(float(torch.stack(losses).mean()))
        accelerator.print(f"epoch {epoch + 1}: loss {epochs[-1]:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    accelerator.print("saved, and restored bit for bit")
    return epochs[0], epochs[-1]


if __name__ == "__main__":
    main()
