"""Training that goes on after a rank was lost, by the names of Horovod's documentation: `hvd.elastic`.

    state = hvd.elastic.TorchState(model, optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            ...
            state.commit()

    train(state)

Started by gradwire run --min-np N, the other ranks go on when one is lost; started by torchrun --max-restarts N, all of them are
started again. They go on from the newest commit, which outlives a process in the memory of its host. docs/guides/elastic.md.
"""

from gradwire.trainer.elastic.failures import GaveUp as GaveUp
from gradwire.trainer.elastic.run import run as run
from gradwire.trainer.elastic.sampler import ElasticSampler as ElasticSampler
from gradwire.trainer.elastic.state import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from gradwire.trainer.elastic.state import ObjectState as ObjectState
from gradwire.trainer.elastic.state import TorchState as TorchState
