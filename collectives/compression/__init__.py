"""Gradient codecs, which encode a chunk in fewer bytes before it is sent."""

from gradwire.collectives.compression.codec import Codec as Codec
from gradwire.collectives.compression.codec import MatrixCodec as MatrixCodec
from gradwire.collectives.compression.dense import QSGD as QSGD
from gradwire.collectives.compression.dense import BFloat16 as BFloat16
from gradwire.collectives.compression.dense import Float8 as Float8
from gradwire.collectives.compression.dense import Float16 as Float16
from gradwire.collectives.compression.dense import Int4 as Int4
from gradwire.collectives.compression.dense import Int8 as Int8
from gradwire.collectives.compression.dense import Natural as Natural
from gradwire.collectives.compression.dense import OneBit as OneBit
from gradwire.collectives.compression.dense import TernGrad as TernGrad
from gradwire.collectives.compression.feedback import Feedback as Feedback
from gradwire.collectives.compression.powersgd import PowerSGD as PowerSGD
from gradwire.collectives.compression.registry import CODECS as CODECS
from gradwire.collectives.compression.registry import make_codec as make_codec
from gradwire.collectives.compression.registry import register_codec as register_codec
from gradwire.collectives.compression.sparse import DGC as DGC
from gradwire.collectives.compression.sparse import ChunkTopK as ChunkTopK
from gradwire.collectives.compression.sparse import RandomK as RandomK
from gradwire.collectives.compression.sparse import Threshold as Threshold
from gradwire.collectives.compression.sparse import TopK as TopK
