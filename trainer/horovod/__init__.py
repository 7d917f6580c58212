"""What Horovod's users know, with its names, arguments and defaults: verbs, a sampler, schedules, SyncBatchNorm."""
