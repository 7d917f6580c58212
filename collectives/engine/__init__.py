"""The execution of plans: the operations of a Communicator, one at a time, and the loop that runs a program on a link."""
