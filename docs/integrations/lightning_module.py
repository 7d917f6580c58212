"""Compresses the gradients of a LightningModule.

torchrun --nproc-per-node 2 lightning_module.py
"""

import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire import ddp_comm_hook

hook = ddp_comm_hook("int8")


class CompressedDDP(DDPStrategy):
    """Registers the hook on every device. On CPUs, DDPStrategy(ddp_comm_hook=...) ignores a hook without a message."""

    def configure_ddp(self):
        super().configure_ddp()
        self.model.register_comm_hook(None, hook)


class Autoencoder(lightning.LightningModule):
    """An ordinary module: compression needs no change in it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def training_step(self, batch):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
model = Autoencoder()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=CompressedDDP(),  # in place of strategy="ddp"
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=16))
if trainer.is_global_zero:
    print(hook.stats)
