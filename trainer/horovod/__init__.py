"""Horovod's API with its names, arguments and defaults: verbs, a sampler, schedules, SyncBatchNorm."""
