"""Training that continues after a rank is lost, with Horovod's names: `hvd.elastic`.

    state = hvd.elastic.TorchState(model, optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            ...
            state.commit()

    train(state)

Under gradwire run --min-np N, the other ranks continue when one is lost. Under torchrun --max-restarts N, torchrun restarts all
ranks. Both continue from the newest commit. Commits are in the memory of the hosts, and survive the end of a process. The guide
is docs/guides/elastic.md.
"""

from gradwire.trainer.elastic.failures import GaveUp as GaveUp
from gradwire.trainer.elastic.run import run as run
from gradwire.trainer.elastic.sampler import ElasticSampler as ElasticSampler
from gradwire.trainer.elastic.state import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from gradwire.trainer.elastic.state import ObjectState as ObjectState
from gradwire.trainer.elastic.state import TorchState as TorchState
