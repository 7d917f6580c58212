"""Lets programs that import Horovod find this package."""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

import trainer
from trainer.horovod.reductions import allreduce

_log = logging.getLogger("gradwire")

VERSION = "0.28.1"
"""The version of Horovod whose interface this is, as programs ask for it in order to know what they may call."""
