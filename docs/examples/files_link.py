"""A link that moves messages as files, for ranks of one host: docs/extending.md. Import this module on every rank."""

import fcntl
import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from gradwire.collectives import register_link
from gradwire.collectives.errors import LinkError
from gradwire.collectives.transports import Transport


class Sent:
    def wait(self, deadline):
        """Return at once: the file was written when the message was posted."""

    def is_done(self):
        return True


class Arriving:
    def __init__(self, transport, peer, tensor, tag):
        self.transport, self.peer, self.tensor, self.tag = transport, peer, tensor, tag
        self.has_come = False

    def fill(self, data):
        memoryview(self.tensor.view(torch.uint8).numpy())[:] = data
        self.has_come = True

    def wait(self, deadline):
        while not self.has_come:
            over = self.transport.is_gone(self.peer) or self.transport.is_gone(self.transport.rank)
            self.transport.look()  # after is_gone(), because a peer may have sent this message before it ended
            if not self.has_come and (over or time.monotonic() >= deadline):
                raise LinkError(self.peer, timed_out=not over, detail=f"nothing came from rank {self.peer}")
            time.sleep(0.001)

    def is_done(self):
        self.transport.look()
        return self.has_come


class Files(Transport):
    """A file's name is a message's sender, number and tag."""

    def __init__(self, rank, size, root):
        self.rank, self.size, self.root = rank, size, root
        self.inbox = root / f"{rank}"
        self.inbox.mkdir()
        self.lock = (root / f"{rank}.lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.numbers = Counter()  # how many messages this rank has sent to each peer
        self.awaited = []  # receives that are not filled, in the order in which they were posted

    def post(self, sends, receives, tag):
        received = [Arriving(self, peer, tensor, tag) for peer, tensor in receives]
        self.awaited += received
        for peer, tensor in sends:
            self.numbers[peer] += 1
            message = self.root / f"{self.rank}-{self.numbers[peer]}-{tag}"
            try:
                message.write_bytes(tensor.view(torch.uint8).numpy())
                message.rename(self.root / f"{peer}" / message.name)  # so that the peer never reads half a message
            except OSError as error:
                raise LinkError(peer, timed_out=False, detail=str(error)) from error
        return [Sent() for _ in sends], received

    def look(self):
        """Give each message that has arrived to the first receive that waits for it."""
        come = []
        with suppress(FileNotFoundError):  # close() has removed the folder, in another thread
            come += [(*map(int, path.name.split("-")), path) for path in self.inbox.iterdir()]
        for sender, _, tag, path in sorted(come):
            message = next((each for each in self.awaited if (each.peer, each.tag) == (sender, tag)), None)
            if message is not None:
                self.awaited.remove(message)
                with suppress(FileNotFoundError):
                    message.fill(path.read_bytes())
                    path.unlink()

    def is_gone(self, rank):
        try:
            with (self.root / f"{rank}.lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            pass
        return True

    def abort(self):
        self.lock.close()

    def close(self):
        self.abort()
        shutil.rmtree(self.inbox, ignore_errors=True)
        Path(self.lock.name).unlink(missing_ok=True)
        with suppress(OSError):  # the folder is not empty until the last rank closes
            self.root.rmdir()


def files(membership, timeout_s):
    deadline = time.monotonic() + timeout_s
    made = tempfile.mkdtemp(prefix="gradwire-") if membership.rank == 0 else ""
    root = membership.everyones("files", made.encode(), deadline)[0].decode()
    transport = Files(membership.rank, membership.size, Path(root))
    try:
        membership.everyones("files are there", b"", deadline)
    except BaseException:
        transport.close()
        raise
    return transport


register_link("files", files)
