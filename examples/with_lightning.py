"""Trains with PyTorch Lightning: a module with dmattn's layer, masks in the batch, a checkpoint. Seconds on a CPU.

pip install pytorch-lightning                   # or lightning, which brings it
python examples/with_lightning.py
"""

from __future__ import annotations

import argparse
import tempfile

import pytorch_lightning as lightning
import torch
import torch.nn.functional as F
from dmattn import IntervalMask
from dmattn.nn import DynamicMaskAttention, ScoreRecipe
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, LENGTH, WIDTH = 32, 64, 32


class LanguageModel(lightning.LightningModule):
    """One layer of attention that learns which keys to keep, over packed documents."""

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = DynamicMaskAttention(
            WIDTH, 4, window=8, local=8, recipe=ScoreRecipe.doge(score="linear", select_only=True)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, IntervalMask], index: int) -> Tensor:
        tokens, documents = batch  # Lightning has moved both to the device
        attended, score_loss = self.attention(self.embedding(tokens), base=documents, with_score_loss=True)
        loss = F.cross_entropy(self.head(attended)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(float(loss.detach()))
        return loss + score_loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])


def packed(count: int) -> list[tuple[Tensor, IntervalMask]]:
    """Sequences of two documents that repeat a token each: (tokens [LENGTH], the documents' mask)."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(count):
        cut = int(torch.randint(8, LENGTH - 8, (), generator=generator))
        first, second = torch.randint(0, VOCABULARY, (2,), generator=generator).tolist()
        tokens = torch.full((LENGTH,), first)
        tokens[cut:] = second
        samples.append((tokens, IntervalMask.documents(LENGTH, torch.tensor([0, cut, LENGTH]))))
    return samples


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Trains and loads the checkpoint. Returns the first and the last loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", dest="steps", action="store_const", const=5, help="--steps 5: does it run")
    given = parser.parse_args(arguments)

    lightning.seed_everything(0, verbose=False)
    model = LanguageModel()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=given.steps, accelerator="auto", devices=1, default_root_dir=folder, logger=False,
            enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        )  # fmt: skip
        trainer.fit(model, DataLoader(packed(64), batch_size=8))
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        loaded = LanguageModel.load_from_checkpoint(f"{folder}/last.ckpt")
    for (name, ours), theirs in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu()), name
    print(f"loss {model.losses[0]:.3f} at first, {model.losses[-1]:.3f} after {given.steps} steps; checkpoint restored")
    return model.losses[0], model.losses[-1]


if __name__ == "__main__":
    main()
