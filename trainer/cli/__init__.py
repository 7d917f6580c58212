"""The command `gradwire`: what can be asked of the packages from a shell, and how a job is started from one."""
