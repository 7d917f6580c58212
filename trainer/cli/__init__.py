"""The command `gradwire`: what can be asked of gradwire from a shell, and how a job is started from one."""
