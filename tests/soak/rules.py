"""Draw how a world trains, and what befalls one of its ranks: from a seed and an index alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import gradwire as hvd
from tests.soak.faults import EXITS, KILLED, RAISES, STOPPED, FaultOfOne
from tests.soak.habits import HABITS

SYNCHRONOUS, LOCAL, SERVER, KEYS, HOGWILD = RULES = (
    "DistributedOptimizer",
    "LocalUpdates",
    "ParameterServer",
    "KVStore",
    "Hogwild",
)
WITHOUT_SHARED_MEMORY = tuple(rule for rule in RULES if rule != HOGWILD)
KINDS = (KILLED, STOPPED, RAISES, EXITS)
BEFORE, BACKWARD, EXCHANGE, BETWEEN, WARMUP, FRAGMENT, SAVING = MOMENTS = (
    "before a step",
    "in backward()",
    "some time into a step",
    "after a step",
    "some time into a step of the warm-up",
    "some time after a fragment has set out",
    "between state_dict() and load_state_dict()",
)

TIMEOUT_S = 6.0  # of an operation that may run into it
FAR_S = 60.0  # of one that must not
LATEST_STEP = 12
LONGEST_S = 0.03
CODECS = ("none", "fp16", "int8", "int4", "onebit", "topk", "powersgd")
WITH_FEEDBACK = ("int8", "int4")


@dataclass(frozen=True)
class Rule:
    """Says how ranks train: the class of the optimizer or of its rule, the options of both, and what else its making needs.

    feedback: whether the codec of a DistributedOptimizer is to have error feedback. momentum: of the outer optimizer of
    LocalUpdates, None for none. pairs: whether pairs of ranks average in every step. habit: of HABITS, what the program does to
    gradients around each step.
    """

    name: str
    options: Mapping[str, Any]
    feedback: bool = False
    momentum: float | None = None
    pairs: bool = False
    habit: str = "none"

    def outlives(self, victim: int, size: int) -> bool:
        """Return whether the others go on without a rank."""
        serves = victim in (self.options.get("servers") or range(size))
        if self.name == SERVER:
            return self.options["quorum"] < size and not serves
        if self.name == KEYS:
            return self.options["type"] == "dist_async" and not serves
        return self.name == HOGWILD

    def may_fail_while_saving(self, size: int) -> bool:
        return self.name in (SYNCHRONOUS, LOCAL) or (self.name == SERVER and self.options["quorum"] == size)

    def exchanges_after(self, step: int, size: int) -> bool:
        """Return whether all of so many ranks hold the same after a step (from 0 on)."""
        if self.name not in (SYNCHRONOUS, LOCAL):
            return self.options.get("quorum") == size or self.options.get("type") == "dist_sync"
        alone = step + 1 - self.options.get("warmup_steps", 0)
        late = self.options.get("delay", 0) or self.options.get("fragments", 1) > 1
        return self.name == SYNCHRONOUS or alone <= 0 or (not late and alone % self.options["every"] == 0)

    def __str__(self) -> str:
        more = {"feedback": self.feedback, "momentum": self.momentum, "pairs": self.pairs, "habit": self.habit}
        said = {**self.options, **{name: value for name, value in more.items() if value and value != "none"}}
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in said.items())})"


@dataclass(frozen=True)
class TrainingFault(FaultOfOne):
    """A fault of ranks that train by a rule, at a moment of a step.

    after_s: the time for which that has gone on then. survivors_close: whether the others close their optimizer after the
    error.
    """

    moment: str
    step: int
    after_s: float
    rule: Rule
    survivors_close: bool

    @property
    def timeout_s(self) -> float:
        return TIMEOUT_S if self.kind == STOPPED else FAR_S

    @property
    def silence_s(self) -> float:
        """Return for how long a rank that fails so may be taken for alive."""
        return TIMEOUT_S if self.kind == STOPPED else 0.0

    @property
    def is_outlived(self) -> bool:
        return self.rule.outlives(self.victim, self.size)

    def culprits(self, rank: int) -> set[int]:
        """Return whom a rank may name: the victim; of two that average in every step also the other one, whom a victim that does
        not answer holds up, and the victim by its number among the two."""
        if not self.rule.pairs:
            return {self.victim}
        if rank // 2 == self.victim // 2:
            return {self.victim, self.victim % 2}
        return {self.victim, self.victim ^ 1} if self.kind == STOPPED else {self.victim}

    def __str__(self) -> str:
        close = ", survivors close" if self.survivors_close else ""
        moment = f"{self.moment}, {self.step}, after {1000 * self.after_s:.0f} ms"
        return f"rank {self.victim} of {self.size} {self.kind} {moment}; {self.rule}{close}"


def draw_training_fault(seed: int, transport: str, index: int) -> TrainingFault:
    """Return a fault of a world on one transport."""
    random = Random(f"{seed}/{transport}/training/{index}")
    size = random.choice((3, 4))
    rules = RULES if transport == "shared_memory" else WITHOUT_SHARED_MEMORY
    rule = _DRAW[random.choice(rules)](random, size)
    kind, step = random.choice(KINDS), random.randint(0, LATEST_STEP)
    moments = [BEFORE, BACKWARD, BETWEEN]
    if kind in (KILLED, STOPPED):
        moments.append(EXCHANGE)
        moments += [WARMUP] if rule.options.get("warmup_steps") else []
        moments += [FRAGMENT] if rule.options.get("delay") else []
    moments += [SAVING] if rule.may_fail_while_saving(size) else []
    moment = random.choice(moments)
    if moment == WARMUP:
        step = random.randrange(rule.options["warmup_steps"])
    elif moment == FRAGMENT:
        every, fragments = rule.options["every"], rule.options["fragments"]
        step = rule.options.get("warmup_steps", 0) + random.randint(1, 2 * fragments) * every // fragments - 1
    return TrainingFault(
        seed=seed,
        transport=transport,
        index=index,
        size=size,
        victim=random.randrange(size),
        kind=kind,
        moment=moment,
        step=step,
        after_s=random.random() * LONGEST_S,
        rule=rule,
        survivors_close=random.random() < 0.5,
    )


def _synchronous(random: Random, size: int) -> Rule:
    codec = random.choice(CODECS)
    shards = random.random() < 0.3
    options = {
        "compression": codec,
        "bucket_bytes": random.choice((None, 1024)),
        "backward_passes_per_step": random.choice((1, 1, 2)),
        "rule": hvd.rules.Sharded(random.choice(("none", "int8", "onebit"))) if shards else None,
    }
    feedback = codec in WITH_FEEDBACK and random.random() < 0.7
    # Of shards, a rank may not change its gradients.
    habits = ["none", "clips in hooks"] if shards else list(HABITS)
    return Rule(SYNCHRONOUS, options, feedback, habit=random.choice(habits))


def _local(random: Random, size: int) -> Rule:
    every, fragments = random.randint(2, 6), random.randint(1, 2)
    delay = random.choice((0, random.randint(0, every // fragments - 1)))
    options: dict[str, Any] = {
        "every": every,
        "fragments": fragments,
        "delay": delay,
        "alpha": random.choice((0.0, 0.5)),
        "warmup_steps": random.choice((0, 3)),
        "compression": random.choice(("none", "chunktopk", "chunktopk", "int8", "onebit")),
        "bucket_bytes": random.choice((None, 1024)),
    }
    return Rule(LOCAL, options, momentum=random.choice((None, 0.0, 0.9)), pairs=size == 4 and random.random() < 0.3)


def _server(random: Random, size: int) -> Rule:
    options: dict[str, Any] = {
        "quorum": random.choice((size, size - 1, size - 1, 1)),
        "staleness": random.choice((None, 0, 2)),
        "late": random.choice(("weight", "drop", "next")),
        "servers": random.choice((None, [0], [0], [size - 1], [0, 1])),
        "grace_s": random.choice((0.0, 0.0, 0.005)),
        "compression": random.choice(("none", "none", "int8", "onebit")),
    }
    return Rule(SERVER, options)


def _keys(random: Random, size: int) -> Rule:
    servers = random.choice((None, [0], [size - 1], [0, 1]))
    return Rule(KEYS, {"type": random.choice(("dist_sync", "dist_async")), "servers": servers})


_DRAW = {
    SYNCHRONOUS: _synchronous,
    LOCAL: _local,
    SERVER: _server,
    KEYS: _keys,
    HOGWILD: lambda random, size: Rule(HOGWILD, {}),
}
