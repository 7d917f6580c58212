"""The share of the time that ranks compute, over bandwidth and the steps between exchanges."""
