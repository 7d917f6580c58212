"""`python -m gradwire.bench NAME ...` runs a benchmark; `NAME --help` lists its flags."""

from __future__ import annotations

import importlib
import sys

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall", "barrier", "latency", "bandwidth")
MODULES = {
    "train": "gradwire.bench.training.train",
    "step": "gradwire.bench.training.step",
    "backends": "gradwire.bench.training.backends",
    "convergence": "gradwire.bench.training.convergence",
    "rules": "gradwire.bench.training.rules",
    "codec": "gradwire.bench.codec.run",
    "predicted": "gradwire.bench.predicted",
    "failures": "gradwire.bench.failures.run",
    "simulate": "gradwire.bench.simulate.run",
}
#: The benchmarks that run under torchrun, also on simulated hosts.
BENCHMARKS = (*COLLECTIVES, "train", "step", "backends", "convergence", "rules", "predicted")

USAGE = """\
usage: torchrun --nproc-per-node 4 -m gradwire.bench COLLECTIVE [flags]    a collective: time, bandwidth, correctness
       torchrun --nproc-per-node 2 -m gradwire.bench train [flags]         a small model, with checkpoints and a picture
       torchrun --nproc-per-node 2 -m gradwire.bench step [flags]          a training step beside DDP's
       torchrun --nproc-per-node 2 -m gradwire.bench backends [flags]      torch's ways to train, over gloo and over gradwire
       torchrun --nproc-per-node 4 -m gradwire.bench convergence [flags]   training with and without every codec
       torchrun --nproc-per-node 4 -m gradwire.bench rules [flags]         training by several update rules
       torchrun --nproc-per-node 4 -m gradwire.bench predicted [flags]     predicted beside measured times
       gradwire bench codec [flags]                                        every codec beside torch's operations
       gradwire bench failures [flags]                                     training while ranks are killed
       gradwire simulate [flags]                                           training on ranks that are described
       gradwire bench hosts [flags] -- NAME|COMMAND                        any of these on simulated hosts (as root)

COLLECTIVE is one of {collectives}; latency and bandwidth are those of
messages between two ranks."""


def main() -> int:
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in COLLECTIVES:
        from gradwire.bench.micro import run as micro

        return micro.main(name, arguments)
    if name == "hosts":
        from gradwire.bench import hosts

        return hosts.main(arguments, BENCHMARKS)
    if name in MODULES:
        return int(importlib.import_module(MODULES[name]).main(arguments))
    asked = name in ("-h", "--help")
    if not asked:
        print(f"there is no benchmark {name!r}", file=sys.stderr)
    print(USAGE.format(collectives=", ".join(COLLECTIVES)), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
