"""Start, or go on where an earlier run ended, with the same command: torchrun --nproc-per-node 2 resume.py"""

from pathlib import Path

import torch

import trainer as hvd

STEPS, SAVE_EVERY = 60, 20

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 8)
optimizer = hvd.LocalUpdates(torch.optim.AdamW(model.parameters(), lr=1e-2), every=7, warmup_steps=10)
folder = Path(f"checkpoints/rank{hvd.rank()}of{hvd.size()}")  # need not be one that other hosts see
folder.mkdir(parents=True, exist_ok=True)
mine = {int(path.stem) for path in folder.glob("*.pt")}
begun = max(set.intersection(*hvd.allgather_object(mine)), default=0)  # the newest that all ranks have
if begun:
    saved = torch.load(folder / f"{begun}.pt", weights_only=True)
    model.load_state_dict(saved["model"])  # first: a ParameterServer takes its parameters from the model
    optimizer.load_state_dict(saved["optimizer"])
for step in range(begun + 1, STEPS + 1):
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + hvd.rank()))
    optimizer.zero_grad()
    (model(inputs) - inputs[:, :8]).square().mean().backward()
    optimizer.step()
    if step % SAVE_EVERY == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "unfinished")
        (folder / "unfinished").rename(folder / f"{step}.pt")  # so that whoever dies leaves whole files
        hvd.barrier()  # all ranks have this one: the one before it may go
        (folder / f"{step - SAVE_EVERY}.pt").unlink(missing_ok=True)
print(f"rank {hvd.rank()} went on after step {begun}: error {(model.weight - torch.eye(8, 64)).norm():.6f}", flush=True)
optimizer.close()
hvd.shutdown()
