"""registry stub, being written"""
from model import GPT, GPTConfig
from value_residual import ValueResidual, ValueResidualConfig

MODELS = {"gpt": (GPTConfig, GPT), "value_residual": (ValueResidualConfig, ValueResidual)}


def build(name, **overrides):
    config_class, model_class = MODELS[name]
    return model_class(config_class(**overrides))
