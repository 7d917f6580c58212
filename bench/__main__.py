"""`python -m bench NAME ...`: each name's own `--help` lists its flags."""

from __future__ import annotations

import sys

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall")
BENCHMARKS = (*COLLECTIVES, "step", "convergence", "rules")

USAGE = """\
usage: torchrun --nproc-per-node 4 -m bench COLLECTIVE [flags]    a collective: time, bandwidth, correctness
       torchrun --nproc-per-node 2 -m bench step [flags]          a training step beside DDP's
       torchrun --nproc-per-node 4 -m bench convergence [flags]   training with every codec, beside training without
       torchrun --nproc-per-node 4 -m bench rules [flags]         training by several update rules
       python -m bench codec [flags]                              every codec's rates and errors, beside torch's operations
       python -m bench hosts [flags] -- COLLECTIVE|step|convergence|rules|COMMAND   any of these on simulated hosts (root)

COLLECTIVE is one of {collectives}."""


def main() -> int:
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in COLLECTIVES:
        from bench import micro

        return micro.main(name, arguments)
    if name == "step":
        from bench import step

        return step.main(arguments)
    if name == "convergence":
        from bench import convergence

        return convergence.main(arguments)
    if name == "rules":
        from bench import rules

        return rules.main(arguments)
    if name == "codec":
        from bench import codec

        return codec.main(arguments)
    if name == "hosts":
        from bench import hosts

        return hosts.main(arguments, BENCHMARKS)
    asked = name in ("-h", "--help")
    if not asked:
        print(f"there is no benchmark {name!r}", file=sys.stderr)
    print(USAGE.format(collectives=", ".join(COLLECTIVES)), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
