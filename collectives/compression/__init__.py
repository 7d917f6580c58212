"""Gradient codecs: what makes a chunk small before it is sent."""

from gradwire.collectives.compression.chunktopk import ChunkTopK
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import (
    QSGD,
    BFloat16,
    Float8,
    Float16,
    Int4,
    Int8,
    Natural,
    OneBit,
    TernGrad,
)
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.registry import CODECS, make_codec, register_codec
from gradwire.collectives.compression.sparse import DGC, RandomK, Threshold, TopK

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
