"""`torchrun --nproc-per-node 4 -m gradwire.bench rules`: the loss that update rules reach, at equal steps or in equal time.

The rules train bytes_gpt from the same weights on the same text, one after the other. Every step of a rank has the same number
of sequences; the step number and the seed select them. The rules differ in what ranks exchange, when, and which ranks they
wait for.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as hvd
from gradwire.bench.options import add_results, count_from, number_from
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.training.rules_report import RuleRow, draw, format_header, format_row
from gradwire.bench.workloads import bytes_gpt, strategies
from gradwire.bench.workloads.loop import Trainee, Training, Workload, join_ranks, share_cores
from gradwire.collectives.compression.sparse import ChunkTopK
from gradwire.trainer.reducer.compression import NAMES, Compressor

DEFAULT = ("synchronous", "average", "diloco", "average+chunktopk")
NONE = "none"
POINTS = 12
"""The number of points of the loss curve of a run after its start."""
FRAGMENTS = 4
"""The number of fragments into which streaming divides the parameters. It exchanges one fragment at a time."""


def codec_of(name: str, k: int = 64) -> Compressor:
    """Return the codec of a name. chunktopk has error feedback, and sends k of 4096 numbers."""
    return hvd.ErrorFeedback(ChunkTopK(k)) if name == "chunktopk" else name


def _local(
    module: nn.Module, codec: str, chosen: argparse.Namespace, *, outer: bool = True, fragments: int = 1, delay: int = 0
) -> Trainee:
    """Return a Trainee of LocalUpdates. outer: whether it has DiLoCo's outer optimizer."""
    momentum = chosen.outer_momentum
    nesterov = torch.optim.SGD(module.parameters(), lr=chosen.outer_lr, momentum=momentum, nesterov=momentum > 0)
    rule = hvd.rules.LocalUpdates(
        chosen.every,
        nesterov if outer else None,
        chosen.warmup_steps,
        codec_of(codec, chosen.k),
        fragments=fragments,
        delay=delay,
    )
    return strategies.local_updates(module, rule, compression=codec_of(chosen.warmup_codec, chosen.k))


def _served(module: nn.Module, chosen: argparse.Namespace, absent: int, staleness: int | None = None) -> Trainee:
    """Return a Trainee of servers that wait for all ranks but `absent`."""
    return strategies.server(module, max(1, hvd.size() - absent), staleness=staleness, late=chosen.late)


#: The functions that make a Trainee of a model, the name of a codec and the options.
RULES: dict[str, Callable[[nn.Module, str, argparse.Namespace], Trainee]] = {
    "alone": lambda module, codec, chosen: strategies.alone(module),
    "ddp": lambda module, codec, chosen: strategies.ddp(module),
    "synchronous": lambda module, codec, chosen: strategies.ours(module, compression=codec_of(codec, chosen.k)),
    "average": partial(_local, outer=False),
    "diloco": _local,
    "streaming": lambda module, codec, chosen: _local(module, codec, chosen, fragments=FRAGMENTS, delay=chosen.delay),
    "server": lambda module, codec, chosen: strategies.server(module, hvd.size()),
    "quorum": lambda module, codec, chosen: _served(module, chosen, 1),
    "stale": lambda module, codec, chosen: _served(module, chosen, 1, staleness=chosen.staleness),
    "asynchronous": lambda module, codec, chosen: strategies.server(module, 1),
    "hogwild": lambda module, codec, chosen: strategies.hogwild(module),
}
CODED = {"synchronous", "average", "diloco", "streaming"}
"""The rules whose exchanges can use a codec."""
UNLIKE = {"alone", "streaming", "quorum", "stale", "asynchronous", "hogwild"}
"""The rules whose ranks do not hold the same parameters at the end."""

NOTES = f"""\
RULE is one of {", ".join(RULES)}.
Local updates: average (with chunktopk the sum of what is sent), diloco, and streaming.
A server makes an update of what all ranks have pushed (server), all but one (quorum, and stale, which bounds how far a rank is
ahead), or any (asynchronous).
loss: on text not trained on, with the parameters that ranks have, each a share of it; over first: over the first
competitor's. reaches: the share of the first competitor's time, steps and bytes after which a loss as low as its last is seen.
sent: the bytes that a rank sends for gradients, pseudo-gradients or parameters. An uncompressed allreduce of n bytes among p
ranks counts as 2(p-1)/p * n."""


@dataclass(frozen=True)
class CompetitorSpec:
    """The name of one competitor of a run: RULE[+CODEC][@SHARE]. share: its share of the steps or the time of the run."""

    text: str
    rule: str
    codec: str
    share: float


@dataclass(frozen=True)
class Point:
    """The progress of all ranks together, and the validation loss then. seconds, sent_bytes: means over the ranks."""

    tokens: float
    seconds: float
    sent_bytes: float
    loss: float


def competitor_spec(text: str) -> CompetitorSpec:
    """Return the CompetitorSpec of a text. Raises argparse.ArgumentTypeError for an invalid one."""
    named, at, share = text.partition("@")
    rule, plus, codec = named.partition("+")
    codec = codec if plus else NONE
    if rule not in RULES:
        raise argparse.ArgumentTypeError(f"{rule!r} is not one of {', '.join(RULES)}")
    if codec not in NAMES or (codec != NONE and rule not in CODED):
        known = f"a codec is one of {', '.join(NAMES)}, with {' or '.join(sorted(CODED))}"
        raise argparse.ArgumentTypeError(f"{text!r}: {known}")
    try:
        portion = float(share) if at else 1.0
    except ValueError:
        portion = math.nan
    if not 0 < portion <= 10:
        raise argparse.ArgumentTypeError(f"{text!r}: after @ comes a share of the run, such as 0.6")
    return CompetitorSpec(text, rule, codec, portion)


def slowness(text: str) -> tuple[int, float]:
    """Return the number of a slow rank, and the seconds that it sleeps in every step, from a text such as 3:0.2."""
    rank, colon, seconds = text.partition(":")
    if not (colon and rank.isdecimal() and seconds.replace(".", "", 1).isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not RANK:SECONDS")
    return int(rank), float(seconds)


def _k(text: str) -> int:
    try:
        return ChunkTopK(count_from(0, text)).k
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench rules",
        description="Train bytes_gpt by several update rules, and compare loss over tokens, time and bytes. Run under torchrun.",
        usage="%(prog)s [flags] RULE[+CODEC][@SHARE] ...",
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, positive, not_negative = parser.add_argument, partial(count_from, 1), partial(count_from, 0)
    add(
        "competitors",
        nargs="*",
        type=competitor_spec,
        metavar="RULE[+CODEC][@SHARE]",
        help=f"SHARE: the part of the steps or seconds for which it trains (default 1); default {' '.join(DEFAULT)}",
    )
    bytes_gpt.add_flags(parser)
    until = parser.add_mutually_exclusive_group()
    until.add_argument("--steps", type=positive, help="steps of each run (default 600)")
    until.add_argument("--seconds", type=partial(number_from, 0.001), help="seconds of each run, instead of steps")
    add("--seed", type=not_negative, default=0, help="seed of the weights and the data (default 0)")
    add("--every", type=positive, default=30, help="steps between two exchanges of local updates (default 30)")
    add("--outer-lr", type=float, default=0.7, help="outer learning rate of diloco and streaming (default 0.7)")
    add("--outer-momentum", type=float, default=0.9, help="Nesterov momentum of diloco and streaming (default 0.9)")
    add("--warmup-steps", type=not_negative, default=150, help="synchronous steps before local updates (default 150)")
    add("--warmup-codec", choices=NAMES, default="none", help="codec of the gradients in these steps (default none)")
    add("--staleness", type=not_negative, default=4, help="staleness of stale, in steps (default 4)")
    add(
        "--late",
        choices=("weight", "drop", "next"),
        default="weight",
        help="what quorum and stale do with late gradients",
    )
    add("--delay", type=not_negative, default=1, help="delay of streaming, in steps (default 1)")
    add("--k", type=_k, default=64, help="how many of 4096 numbers chunktopk sends (default 64)")
    add("--slow", type=slowness, metavar="RANK:SECONDS", help="a rank that sleeps for so many seconds in each step")
    add_results(parser, drawn="the loss over tokens, time and bytes")
    chosen = parser.parse_args(arguments)
    chosen.competitors = chosen.competitors or [competitor_spec(text) for text in DEFAULT]
    if chosen.seconds is None:
        chosen.steps = chosen.steps or 600
    room = chosen.every // FRAGMENTS
    if chosen.delay >= room and any(each.rule == "streaming" for each in chosen.competitors):
        parser.error(
            f"streaming exchanges {FRAGMENTS} fragments in turn: --delay must be less than --every // {FRAGMENTS} = {room}, "
            f"not {chosen.delay}"
        )
    return chosen


def reached(curve: Sequence[Point], target: Point) -> Point | None:
    """Return the first point with a loss as low as the target's, by linear interpolation; None if there is none."""
    for before, after in itertools.pairwise(curve):
        if after.loss <= target.loss:
            share = (before.loss - target.loss) / (before.loss - after.loss) if before.loss > target.loss else 0.0
            pairs = zip(astuple(before), astuple(after), strict=True)
            return Point(*(one + share * (other - one) for one, other in pairs))
    return None


@dataclass(frozen=True)
class _Snapshot:
    """The parameters of a rank at one time of the run, with its steps, seconds and sent bytes until then."""

    done: list[float]
    parameters: list[Tensor]


def _curve_of(trainee: Trainee, workload: Workload, training: Training) -> Callable[[], list[Point]]:
    """Train to the end. Return a collective function that returns the loss over the run: every rank validates its share of the
    data with its own parameters. It is called last, since ranks that are not in step end at different times."""
    parameters = list(trainee.module.parameters())
    snapshots: list[_Snapshot] = []

    def snap() -> None:
        copied = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
        snapshots.append(_Snapshot([training.steps, training.elapsed_s, trainee.sent_bytes(training.steps)], copied))

    @torch.no_grad()
    def validated(snapshot: _Snapshot) -> Point:
        for parameter, copied in zip(parameters, snapshot.parameters, strict=True):
            parameter.copy_(copied)
        loss, _ = trainee.validate(workload)
        steps, seconds, sent = hvd.allreduce(torch.tensor(snapshot.done, dtype=torch.float64), op=hvd.Average).tolist()
        return Point(steps * workload.items_per_step, seconds, sent, loss)

    snap()
    for _ in training.blocks():
        if training.fraction() * POINTS >= len(snapshots) or training.fraction() >= 1:
            snap()

    def curve() -> list[Point]:
        shortest = min(hvd.allgather_object(len(snapshots)))  # a slow rank may have fewer
        return [validated(snapshot) for snapshot in [*snapshots[: shortest - 1], snapshots[-1]]]

    return curve


def train(chosen: argparse.Namespace, which: CompetitorSpec, first: RuleRow | None) -> RuleRow:
    """Train one competitor. A collective call. first: the row of the first competitor; None for that one."""
    workload = bytes_gpt.workload(bytes_gpt.size_of(chosen), chosen.batch * hvd.size(), chosen.seed)
    trainee = RULES[which.rule](workload.build(), which.codec, chosen)
    steps = chosen.steps and max(1, round(chosen.steps * which.share))
    seconds = chosen.seconds and chosen.seconds * which.share
    slow, slow_s = chosen.slow or (None, 0.0)
    training = Training(workload, [trainee], steps, seconds, slow_s if slow == hvd.rank() else 0.0)
    curve_of = _curve_of(trainee, workload, training)
    waited_s, report = trainee.wait_s(), trainee.report()
    trainee.close()  # before any other collective call, since slow ranks may need it to finish
    is_same = trainee.is_identical()
    curve = curve_of()
    last = curve[-1]
    target = Point(**first.curve[-1]) if first is not None else last
    found = reached(curve, target)
    return RuleRow(
        competitor=which.text,
        seed=chosen.seed,
        world_size=hvd.size(),
        parameters=sum(parameter.numel() for parameter in trainee.module.parameters()),
        steps=last.tokens / workload.items_per_step,
        seconds=last.seconds,
        tokens_per_s=last.tokens / last.seconds,
        sent_bytes=last.sent_bytes,
        wait_share=None if waited_s is None else _average(waited_s / training.elapsed_s),
        loss=last.loss,
        over_first=last.loss / target.loss,
        reach_time=None if found is None else found.seconds / target.seconds,
        reach_tokens=None if found is None else found.tokens / target.tokens,
        reach_bytes=None if found is None or not target.sent_bytes else found.sent_bytes / target.sent_bytes,
        replicas_identical=None if which.rule in UNLIKE else is_same,
        report=report,
        curve=[asdict(point) for point in curve],
    )


def _average(value: float) -> float:
    """Return the mean over ranks. Collective."""
    return float(hvd.allreduce(torch.tensor([value], dtype=torch.float64), op=hvd.Average).item())


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return, on every rank, 1 if replicas differ that should be equal, and 2 if the rank of --slow does not
    exist."""
    chosen = parse_arguments(arguments)
    join_ranks("cpu")
    if chosen.slow is not None and chosen.slow[0] >= hvd.size():
        print(
            f"bench rules: --slow names rank {chosen.slow[0]}, and there are ranks 0 to {hvd.size() - 1}",
            file=sys.stderr,
        )
        return 2
    share_cores()
    settings = {name: value for name, value in vars(chosen).items() if name not in ("competitors", "json", "plot")}
    meta = {
        **software_and_machine(torch.device("cpu")),
        "backend": dist.get_backend(),
        **settings,
        "context": bytes_gpt.size_of(chosen).context,
        "slow": chosen.slow and f"rank {chosen.slow[0]} sleeps {chosen.slow[1]:g} s in each step",
    }
    rows: list[RuleRow] = []
    for which in chosen.competitors:
        row = train(chosen, which, rows[0] if rows else None)
        rows.append(row)
        if hvd.rank() == 0:
            heading = format_header(meta, row) if len(rows) == 1 else []
            notes = [f"#   {row.report}"] if row.report else []
            print("\n".join([*heading, format_row(row), *notes]), flush=True)
            write_json(chosen.json, meta, rows)  # after each run, since runs are long
    if hvd.rank() == 0 and chosen.plot:
        draw(rows, meta, chosen.plot)
    hvd.shutdown()
    return 0 if all(row.replicas_identical is not False for row in rows) else 1
