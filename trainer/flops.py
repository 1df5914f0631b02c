"""FLOPs of a model and of a training step, from the count in the model's file."""
import sys


def flops_of(model_class, config):
    """flops_per_token of the model's file, for sequences of block_size."""
    return sys.modules[model_class.__module__].flops_per_token(config, config.block_size)


def training_flops(flops):
    """FLOPs of a training step per token, the head's forward and backward with it."""
    return flops["train"] + 3 * flops["head"]
