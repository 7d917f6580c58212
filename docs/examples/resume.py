"""Start, or continue an earlier run, with the same command: torchrun --nproc-per-node 2 resume.py"""

import re
from pathlib import Path

import torch

import gradwire as hvd

STEPS, SAVE_EVERY = 66, 20  # 10 and a multiple of 7, so that the ranks end with the same parameters
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 8)
rule = hvd.rules.LocalUpdates(every=7, warmup_steps=10)
optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), rule=rule)
folder = Path(f"checkpoints/rank{hvd.rank()}of{hvd.size()}")  # other computers need not see this folder
folder.mkdir(parents=True, exist_ok=True)
files = {tuple(map(int, re.findall(r"\d+", str(path)))): path for path in Path("checkpoints").glob("rank*of*/*.pt")}
found = hvd.allgather_object(set(files))  # for each rank, its files as (rank, world size, step) when they were saved
usable = [{(step, size) for old, size, step in of_rank if old == rank % size} for rank, of_rank in enumerate(found)]
begun, size = max(set.intersection(*usable), default=(0, 1))  # the newest step of which each rank has a file
if begun == 0 and any(found):
    raise SystemExit(f"no step has a file for each of {hvd.size()} ranks; by rank, (rank, world size, step): {found}")
for path in (path for path in files.values() if int(path.stem) != begun):
    path.unlink(missing_ok=True)  # an older file, or one of a run that ended before all ranks had saved this step
if begun:
    saved = torch.load(files[hvd.rank() % size, size, begun], weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
if hvd.rank() == 0:
    print(f"continues after step {begun} of {STEPS}" if begun else f"starts at step 1 of {STEPS}")
for step in range(begun + 1, STEPS + 1):
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + hvd.rank()))
    optimizer.zero_grad()
    loss = (model(inputs) - inputs[:, :8]).square().mean()
    loss.backward()
    optimizer.step()
    if step % SAVE_EVERY == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "unfinished")
        (folder / "unfinished").rename(folder / f"{step}.pt")  # so that a crash leaves no incomplete file
        hvd.barrier()  # all ranks have saved this step, so the previous file is not needed any more
        (folder / f"{step - SAVE_EVERY}.pt").unlink(missing_ok=True)
        if hvd.rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, saved")
if hvd.rank() == 0:
    torch.save(model.state_dict(), "model.pt")
    print(f"step {STEPS}: loss {loss.item():.3f}, the end")
hvd.shutdown()
