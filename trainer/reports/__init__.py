"""The reports of training: stragglers, the metrics of a step, a timeline."""
