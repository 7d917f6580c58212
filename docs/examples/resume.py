"""Start, or go on where an earlier run ended, with the same command: torchrun --nproc-per-node 2 resume.py"""

from pathlib import Path

import torch

import gradwire as hvd

STEPS, SAVE_EVERY = 66, 20  # 10 and a multiple of 7, so that the ranks end with the same parameters
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 8)
optimizer = hvd.LocalUpdates(torch.optim.AdamW(model.parameters(), lr=1e-2), every=7, warmup_steps=10)
folder = Path(f"checkpoints/rank{hvd.rank()}of{hvd.size()}")  # need not be one that other computers see
folder.mkdir(parents=True, exist_ok=True)
found = hvd.allgather_object({int(path.stem) for path in folder.glob("*.pt")})
begun = max(set.intersection(*found), default=0)  # the newest step that all ranks have
if begun == 0 and any(found):
    raise SystemExit(f"no step is in the checkpoints of all ranks, which have {found}")
for newer in found[hvd.rank()] - set(range(begun + 1)):
    (folder / f"{newer}.pt").unlink()  # of a run that died before all ranks had saved this
if begun:
    saved = torch.load(folder / f"{begun}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
for step in range(begun + 1, STEPS + 1):
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + hvd.rank()))
    optimizer.zero_grad()
    (model(inputs) - inputs[:, :8]).square().mean().backward()
    optimizer.step()
    if step % SAVE_EVERY == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "unfinished")
        (folder / "unfinished").rename(folder / f"{step}.pt")  # so a process that dies leaves whole files
        hvd.barrier()  # all ranks have this one: the one before it may go
        (folder / f"{step - SAVE_EVERY}.pt").unlink(missing_ok=True)
if hvd.rank() == 0:
    torch.save(model.state_dict(), "model.pt")
optimizer.close()
hvd.shutdown()
