"""Elastic jobs: a rank that is lost ends no other process, and is replaced; hosts come and go.

The launcher (job) tells a policy what has happened, and does what that decides: it has an agent on each host start and kill
workers, and writes the epochs to the store that it keeps.
"""
