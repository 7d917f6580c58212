"""What an optimizer reports: the metrics of a step, the ranks for which others wait, and the bytes sent: `hvd.reports`."""

from gradwire.trainer.reducer.traffic import ExchangeStats as ExchangeStats
from gradwire.trainer.reports.metrics import StepMetrics as StepMetrics
from gradwire.trainer.reports.stragglers import Stragglers as Stragglers
