"""Trains a model of timm, in the pattern of its train.py, with DistributedOptimizer in place of DDP.

torchrun --nproc-per-node 2 timm_train.py
"""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad

import gradwire as hvd

STEPS = 12

hvd.init()
torch.manual_seed(hvd.rank())
model = timm.create_model("test_vit", pretrained=False, num_classes=10, img_size=32)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
optimizer = hvd.DistributedOptimizer(
    optimizer, model.named_parameters(), compression="int8", policy={"*.qkv.weight": hvd.ErrorFeedback("int4")}
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=STEPS, warmup_epochs=2)
ema = ModelEmaV3(model, decay=0.99)
loss_function = LabelSmoothingCrossEntropy(smoothing=0.1)

for step in range(STEPS):
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    optimizer.zero_grad()
    loss = loss_function(model(images), labels)
    loss.backward()  # gradients are averaged when this returns
    dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
    optimizer.step()
    ema.update(model, step=step)
    scheduler.step(step + 1)
if hvd.rank() == 0:
    print(f"loss {loss.item():.3f}; {optimizer.stats}")
hvd.shutdown()
