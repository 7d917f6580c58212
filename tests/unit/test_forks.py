"""What a forked child does for objects of its parent."""

import os

from gradwire.collectives.forks import in_forked_child


class Owner:
    pass


def test_an_action_that_fails_leaves_the_others_to_run() -> None:
    fails, writes, gone = Owner(), Owner(), Owner()
    reader, writer = os.pipe()
    in_forked_child(fails, lambda _: 1 / 0)
    in_forked_child(writes, lambda _: os.write(writer, b"done"))
    in_forked_child(gone, lambda _: os.write(writer, b"not deleted"))
    del gone
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as written:
        assert written.read() == b"done"
