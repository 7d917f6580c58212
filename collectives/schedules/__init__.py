"""Plans of operations, as data: schedules, algorithms, topology and selection. No tensors, no I/O."""
