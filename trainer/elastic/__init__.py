"""Training that goes on after a rank was lost, by the names of Horovod's documentation: `hvd.elastic`.

    state = hvd.elastic.TorchState(model, optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            ...
            state.commit()

    train(state)

Started by torchrun --max-restarts N, all ranks are started again when one is lost, and go on from the newest commit, which
outlives them in the memory of their hosts. docs/guides/elastic.md.
"""

from gradwire.trainer.elastic.run import GaveUp as GaveUp
from gradwire.trainer.elastic.run import run as run
from gradwire.trainer.elastic.sampler import ElasticSampler as ElasticSampler
from gradwire.trainer.elastic.state import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from gradwire.trainer.elastic.state import ObjectState as ObjectState
from gradwire.trainer.elastic.state import TorchState as TorchState
