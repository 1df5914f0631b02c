"""
Train any model of this project, on one device or several.

    python train.py                                       configs/laptop.toml: three minutes on two CPU cores, offline
    python train.py --model=value_residual                the same, with another model; --help lists every setting
    python train.py configs/owt_124m.toml --seed=2        a preset, and flags over it
    python train.py --resume --out_dir=runs/gpt-1         go on from the last checkpoint, bit for bit on a CPU
    torchrun --nproc_per_node=2 train.py ...              data-parallel: the same batches, shared out

A run writes to runs/<model>-<n>: log.jsonl, last.pt (to resume from) and best.pt (lowest validation loss).
"""
import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import configs
import data
import kernels
from baselines.feedback import Feedback, FeedbackConfig
from baselines.fusedkv import FusedKV, FusedKVConfig
from baselines.lckv import LCKV, LCKVConfig
from baselines.recurrent import Recurrent, RecurrentConfig
from baselines.shortcuts import Shortcut, ShortcutConfig
from configs import SettingError
from model import GPT, GPTConfig
from mudd import MUDD, MUDDConfig
from value_residual import ValueResidual, ValueResidualConfig
from whitematter import WhiteMatter, WhiteMatterConfig

MODELS = {
    "gpt": (GPTConfig, GPT),
    "value_residual": (ValueResidualConfig, ValueResidual),
    "mudd": (MUDDConfig, MUDD),
    "whitematter": (WhiteMatterConfig, WhiteMatter),
