"""What Horovod's programs find under `hvd.elastic`, as far as it is here: the sampler.

Jobs that go on without a rank that was lost, or with one that is new, are started again from a checkpoint:
docs/guides/checkpoints.md.
"""

from trainer.sampler import ElasticSampler as ElasticSampler
