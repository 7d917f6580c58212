"""Elastic jobs: if a rank is lost, the other processes continue and a new one replaces it; hosts can be added and removed.

The launcher reports events to a policy (through job), and carries out the actions that the policy returns: an agent on each host
starts and kills workers, and the launcher writes the epochs to the store that it runs.
"""
