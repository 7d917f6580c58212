"""What is to be done, as data: schedules, algorithms, topology and selection. No tensors, no I/O."""
