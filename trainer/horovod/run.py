"""horovod.run(): calls a function on new processes of this host, which are ranks of one world."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LOCAL_HOST = "localhost"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    **others: Any,
) -> list[Any]:
    """Call func(*args, **kwargs) on num_proc new processes of this host, and return the results, by rank.

    The function calls init() itself. It, its arguments and its results are pickled. `import horovod.torch` finds gradwire in
    the new processes. A script calls this inside `if __name__ == "__main__":`, since the processes import it.
    np: the older name of num_proc. hosts: None, or this host as "localhost:N" with N = num_proc.

    Raises ValueError for further arguments of Horovod's that are not None, which `gradwire run` has; torch's ChildFailedError,
    with its traceback in the log, if the function raises on a rank, and then ends the others.
    """
    count = num_proc if np is None else np
    others |= {} if hosts in (None, f"{LOCAL_HOST}:{count}") else {"hosts": hosts}
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(
            f"horovod.run() starts processes of this host, without {', '.join(given)}: start the script with `gradwire run` "
            "or torchrun instead"
        )
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"num_proc must be a whole number >= 1, not {count!r}")
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # imports for a second

    config = LaunchConfig(
        *(1, 1, count),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOCAL_HOST}:0",
        max_restarts=0,
        start_method="spawn",
    )
    results = elastic_launch(config, _call)(pickle.dumps((func, tuple(args), dict(kwargs or {}))))
    return [results[rank] for rank in range(count)]


def _call(pickled: bytes) -> Any:
    """Call a pickled function with its arguments, which may be of modules that import Horovod."""
    from gradwire.trainer.horovod.alias import alias_horovod

    alias_horovod()
    func, args, kwargs = pickle.loads(pickled)
    return func(*args, **kwargs)
