"""Gradient codecs: what makes a chunk small before it is sent."""

from collectives.compression.casts import BFloat16, Float16
from collectives.compression.chunktopk import ChunkTopK
from collectives.compression.codec import Codec
from collectives.compression.dgc import DGC
from collectives.compression.feedback import Feedback
from collectives.compression.fp8 import Float8
from collectives.compression.integers import Int4, Int8
from collectives.compression.matrices import MatrixCodec
from collectives.compression.onebit import OneBit
from collectives.compression.powersgd import PowerSGD
from collectives.compression.randomk import RandomK
from collectives.compression.registry import CODECS, make_codec, register_codec
from collectives.compression.stochastic import QSGD, Natural, TernGrad
from collectives.compression.threshold import Threshold
from collectives.compression.topk import TopK

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
