"""The configuration of a training run: a frozen dataclass whose fields are the options of the command line."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gradwire.trainer.reducer.compression import NAMES, encoding_of
from gradwire.trainer.world.launch import read_launch

C = TypeVar("C", bound="LoopConfig")


@dataclass(frozen=True)
class LoopConfig:
    """Holds the options of the training loop; an example's own configuration adds those of its model."""

    steps: Annotated[int | None, "train for this many steps in all"] = None
    seconds: Annotated[float | None, "train for about this long in all"] = None
    out: Annotated[
        Path, "folder for checkpoint.pt (with codecs: and a file for each rank), loss.png and summary.json"
    ] = Path("runs/example")
    resume: Annotated[bool, "continue from the checkpoint in --out, if there is one"] = False
    compare: Annotated[Literal["ddp"] | None, "train a second model under torch's DDP, in turns with ours"] = None
    compression: Annotated[str, f"what gradients travel as: {', '.join(NAMES)}"] = "none"
    device: Annotated[Literal["auto", "cpu", "cuda"], "where to train"] = "auto"
    seed: Annotated[int, "of the initial weights, the order of the data and dropout"] = 0
    batch: Annotated[
        int, "size of the global batch, split evenly over the ranks; the default is rounded up to that"
    ] = 16
    lr: Annotated[float, "peak learning rate of AdamW"] = 2e-3
    warm_up: Annotated[int, "steps until the learning rate reaches its peak"] = 20
    decay_steps: Annotated[int | None, "length of the cosine schedule, where it is not the run's"] = None
    validate_every: Annotated[int, "steps between validations"] = 100
    checkpoint_every: Annotated[int, "steps between checkpoints"] = 200

    def __post_init__(self) -> None:
        for name in ("steps", "seconds", "batch", "decay_steps", "validate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        encoding_of(self.compression)  # raises ValueError for an invalid one
        if self.warm_up < 0:
            raise ValueError(f"warm_up must not be negative, but is {self.warm_up}")

    def until(self: C, steps: int | None = None, seconds: float | None = None) -> C:
        """Return this configuration, or if it sets neither steps nor seconds, a copy with these."""
        if self.steps is None and self.seconds is None:
            return dataclasses.replace(self, steps=steps, seconds=seconds)
        return self


def parse(
    default: C, description: str, positional: str | None = None, presets: dict[str, dict[str, Any]] | None = None
) -> C:
    """Return the configuration that the command line describes. Options that are not given come from the chosen preset,
    else from `default`.

    Every field is an option, except `positional`, an optional argument. A default batch is rounded up to a multiple of
    the ranks launched, and rank 0 prints this.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, hint in get_type_hints(type(default), include_extras=True).items():
        if name == positional:
            parser.add_argument(name, nargs="?", default=getattr(default, name), **argument(hint))
        else:
            parser.add_argument("--" + name.replace("_", "-"), default=getattr(default, name), **argument(hint))
    if presets:
        parser.add_argument("--preset", choices=sorted(presets), help=f"other defaults: {presets}")
        parser.set_defaults(**presets.get(parser.parse_known_args()[0].preset, {}))
    values = vars(parser.parse_args(namespace=argparse.Namespace(batch=None)))
    if values["batch"] is None:
        values["batch"] = shareable(parser.get_default("batch"))
    values.pop("preset", None)
    try:
        return dataclasses.replace(default, **values)
    except ValueError as error:
        parser.error(str(error))


def shareable(batch: int) -> int:
    """Return the batch size, rounded up to a multiple of the ranks launched."""
    launch = read_launch(os.environ)
    rounded = -(-batch // launch.size) * launch.size
    if rounded != batch and launch.rank == 0:
        print(f"a batch of {rounded} instead of {batch}, to split it evenly over {launch.size} ranks", flush=True)
    return rounded


def argument(hint: Any) -> dict[str, Any]:
    """Return the arguments of add_argument() for a field annotated as Annotated[type, help]."""
    kind, text = get_args(hint)
    if NoneType in get_args(kind):
        kind = next(option for option in get_args(kind) if option is not NoneType)
    if kind is bool:
        return {"action": "store_true", "help": text}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind), "help": text}
    return {"type": kind, "help": text}
