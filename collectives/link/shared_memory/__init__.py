"""Memory that the ranks of one host share: how they find it, allocate, reduce and send in it."""
