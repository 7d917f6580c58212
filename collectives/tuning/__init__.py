"""Measure links, codecs and calls, and predict the time of calls, so that 'auto' can choose by it; the core runs without it."""

from gradwire.collectives.tuning.autotune import TuningFile, measure_codecs, predict, tune
from gradwire.collectives.tuning.chooser import Chooser
from gradwire.collectives.tuning.cost_model import Costs

__all__ = ["Chooser", "Costs", "TuningFile", "measure_codecs", "predict", "tune"]
