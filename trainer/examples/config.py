"""Configuration of a training run: a frozen dataclass whose fields are the options on the command line."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

C = TypeVar("C", bound="LoopConfig")


def option(default: Any, help: str, **argument: Any) -> Any:
    """A field of a configuration and its help text; `argument` goes to argparse as it is."""
    return dataclasses.field(default=default, metadata={"help": help, **argument})


@dataclass(frozen=True)
class LoopConfig:
    """What the training loop needs to know; an example's own configuration adds its model."""

    steps: int | None = option(None, "train for this many steps in all", type=int)
    seconds: float | None = option(None, "train for about this long in all", type=float)
    out: Path = option(Path("runs/example"), "folder for checkpoint.pt, loss.png and summary.json", metavar="DIR")
    resume: bool = option(False, "continue from the checkpoint in --out, if there is one")
    compare: str | None = option(None, "train a second model, in turns with ours, under torch's DDP", choices=["ddp"])
    compression: str = option("none", "what gradients travel as", choices=["none", "fp16", "bf16"])
    device: str = option("auto", "where to train", choices=["auto", "cpu", "cuda"])
    seed: int = option(0, "of the initial weights, the order of the data and dropout")
    batch: int = option(16, "size of the global batch, split evenly over the ranks")
    lr: float = option(2e-3, "peak learning rate of AdamW")
    warm_up: int = option(20, "steps until the learning rate reaches its peak")
    decay_steps: int | None = option(None, "length of the cosine schedule, where it is not the run's", type=int)
    validate_every: int = option(100, "steps between validations")
    checkpoint_every: int = option(200, "steps between checkpoints")

    def __post_init__(self) -> None:
        for name in ("steps", "seconds", "batch", "decay_steps", "validate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.warm_up < 0:
            raise ValueError(f"warm_up must not be negative, but is {self.warm_up}")

    def until(self: C, steps: int | None = None, seconds: float | None = None) -> C:
        """This configuration; where it says neither steps nor seconds, with these."""
        if self.steps is None and self.seconds is None:
            return dataclasses.replace(self, steps=steps, seconds=seconds)
        return self


def parse(default: C, description: str, presets: dict[str, dict[str, Any]] | None = None) -> C:
    """Read the command line. What is not given there comes from the chosen preset, else from `default`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for field in dataclasses.fields(default):
        value, argument = getattr(default, field.name), dict(field.metadata)
        if isinstance(value, bool):
            argument["action"] = "store_true"
        elif value is not None:
            argument.setdefault("type", type(value))
        name = field.name if "nargs" in argument else "--" + field.name.replace("_", "-")
        parser.add_argument(name, default=value, **argument)
    if presets:
        parser.add_argument("--preset", choices=sorted(presets), help=f"other defaults: {presets}")
        parser.set_defaults(**presets.get(parser.parse_known_args()[0].preset, {}))
    values = vars(parser.parse_args())
    values.pop("preset", None)
    try:
        return dataclasses.replace(default, **values)
    except ValueError as error:
        parser.error(str(error))
