"""The verbs that Horovod has and torch has not, with its names, arguments and defaults."""
