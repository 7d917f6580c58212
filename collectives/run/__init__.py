"""Doing it: the operations of a Communicator, one after the other, and the loop that runs a program on a link."""
