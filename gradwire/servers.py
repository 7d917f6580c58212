"""Servers inside the ranks, which keep parameters and step them, and training without waiting for the slowest: `hvd.servers`."""

from gradwire.trainer.servers import kvstore as kvstore
from gradwire.trainer.servers.aggregator import ServerReport as ServerReport
from gradwire.trainer.servers.hogwild import Hogwild as Hogwild
from gradwire.trainer.servers.kvstore import KVStore as KVStore
from gradwire.trainer.servers.messages import QuorumLost as QuorumLost
from gradwire.trainer.servers.parameter_server import ParameterServer as ParameterServer
