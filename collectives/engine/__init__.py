"""The execution of operations: a Communicator keeps the calls that it has prepared, and runs them one at a time."""
