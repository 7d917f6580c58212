"""The plans of an exchange that `bench step --plans` compares with the one that the training chooses by measurement."""

from __future__ import annotations

from torch import nn

import gradwire as hvd
from gradwire.trainer.reducer.layout import Item, plan_buckets
from gradwire.trainer.reducer.plans import limits

SIZES_MB = (1, 4, 25, 100)


def fixed_plans(module: nn.Module) -> dict[str, hvd.ExchangePlan]:
    """Return the plans of buckets of SIZES_MB beside backward(), and those at its end, by name. Of those that lay out the same
    buckets for the parameters of `module`, the one with the smallest size."""
    found = {}
    parameters = list(module.parameters())
    for at_end in (False, True):
        layouts = set()
        for size_mb in SIZES_MB:
            plan = hvd.ExchangePlan(size_mb << 20, at_end=at_end)
            first, others = limits(plan)
            items = [Item(each.numel(), each.element_size(), each.dtype, others) for each in parameters]
            order = range(len(items))[::-1]  # in which backward() computes the gradients, about
            layout = plan_buckets(items, order, first_bucket_bytes=first)
            if layout not in layouts:
                layouts.add(layout)
                found[f"{size_mb} MB{' at end' if at_end else ''}"] = plan
    return found
