"""`python -m gradwire.bench NAME ...` runs a benchmark; `NAME --help` lists its flags."""

from __future__ import annotations

import importlib
import sys

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall", "barrier", "latency", "bandwidth")
#: Of each other benchmark: its module, the ranks to start it on (0: it starts without torchrun), and what it does.
MODULES = {
    "train": ("training.train", 2, "a small model, with checkpoints and a picture"),
    "step": ("training.step", 2, "a training step beside DDP's"),
    "gpu": ("gpu.run", 2, "a GPU: steps, calls, overlap, NCCL"),
    "backends": ("training.backends", 2, "torch's ways to train, over gloo and over gradwire"),
    "convergence": ("training.convergence", 4, "training with and without every codec"),
    "convex": ("training.convex", 4, "a known optimum, with and without error feedback"),
    "rules": ("training.rules", 4, "training by several update rules"),
    "replicas": ("training.replicas", 4, "which parameters to validate under local updates"),
    "shares": ("training.shares", 2, "a batch divided among unequal ranks"),
    "utilization": ("utilization.run", 0, "computing and waiting, over bandwidth and steps"),
    "predicted": ("predicted", 4, "predicted beside measured times"),
    "codec": ("codec.run", 0, "every codec beside torch's operations"),
    "failures": ("failures.run", 0, "training while ranks are killed"),
    "private": ("private.run", 0, "a key and checksums, on simulated hosts"),
    "simulate": ("simulate.run", 0, "training on ranks that are described"),
}
#: What some benchmarks import, and all that draw.
EXTRAS = ("matplotlib", "rich")
#: The benchmarks that run under torchrun, also on simulated hosts.
BENCHMARKS = (*COLLECTIVES, *(name for name, (_, ranks, _) in MODULES.items() if ranks))


def usage() -> str:
    """Return what --help prints."""
    commands = [(4, "COLLECTIVE", "a collective: time, bandwidth, correctness")]
    commands += [(ranks, name, what) for name, (_, ranks, what) in MODULES.items()]
    commands.append((0, "hosts", "any of these on simulated hosts (as root)"))
    lines = []
    for ranks, name, what in commands:
        start = f"torchrun --nproc-per-node {ranks} -m gradwire.bench" if ranks else "gradwire bench"
        flags = "[flags] -- NAME|COMMAND" if name == "hosts" else "[flags]"
        lines.append(f"{f'{start} {name} {flags}':66} {what}")
    lines.append(
        f"\nCOLLECTIVE is one of {', '.join(COLLECTIVES)}.\nlatency and bandwidth are those of messages of two ranks."
    )
    return "usage: " + "\n       ".join(lines)


def main() -> int:
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in COLLECTIVES:
        from gradwire.bench.micro import run as micro

        return micro.main(name, arguments)
    if name == "hosts":
        from gradwire.bench import hosts

        return hosts.main(arguments, BENCHMARKS)
    if name in MODULES:
        try:
            module = importlib.import_module(f"gradwire.bench.{MODULES[name][0]}")
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in EXTRAS:
                raise
            print(f"bench {name} needs {missing}: pip install '.[bench]' in a clone of gradwire", file=sys.stderr)
            return 2
        return int(module.main(arguments))
    asked = name in ("-h", "--help")
    if not asked:
        print(f"there is no benchmark {name!r}", file=sys.stderr)
    print(usage(), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
