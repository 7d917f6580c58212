"""Gradient codecs: what makes a chunk small before it is sent."""

from gradwire.collectives.compression.casts import BFloat16, Float16
from gradwire.collectives.compression.chunktopk import ChunkTopK
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dgc import DGC
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.fp8 import Float8
from gradwire.collectives.compression.integers import Int4, Int8
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.collectives.compression.onebit import OneBit
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.randomk import RandomK
from gradwire.collectives.compression.registry import CODECS, make_codec, register_codec
from gradwire.collectives.compression.stochastic import QSGD, Natural, TernGrad
from gradwire.collectives.compression.threshold import Threshold
from gradwire.collectives.compression.topk import TopK

__all__ = [
    "CODECS",
    "DGC",
    "QSGD",
    "BFloat16",
    "ChunkTopK",
    "Codec",
    "Feedback",
    "Float8",
    "Float16",
    "Int4",
    "Int8",
    "MatrixCodec",
    "Natural",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "TernGrad",
    "Threshold",
    "TopK",
    "make_codec",
    "register_codec",
]
