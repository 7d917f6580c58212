"""What Horovod's programs find under `hvd.elastic`, as far as it is here: the sampler.

Jobs that go on without a rank that was lost, or with one that is new, are started again from a checkpoint:
docs/guides/checkpoints.md.
"""

from typing import Any

from gradwire.trainer.horovod.sampler import ElasticSampler as ElasticSampler


def __getattr__(name: str) -> Any:
    """Say what takes the place of what is not here."""
    if name in ("run", "TorchState", "ObjectState", "State"):
        raise AttributeError(
            f"elastic.{name} is absent: torchrun --max-restarts starts the job again, from its last checkpoint"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
