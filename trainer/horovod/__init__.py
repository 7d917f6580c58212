"""Horovod's API with its names, arguments and defaults: verbs, schedules, SyncBatchNorm."""
