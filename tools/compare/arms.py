"""
What a comparison trains: arms, the studies that name lists of them, baselines of equal cost, and sweeps.

An arm is a model with settings of its own, written as model:setting=value:setting=value. A study is a function of the
number of layers L and gives groups of arms; the first arm of a group is the baseline of the others in it.
"""
import ast
import bisect
import functools
import hashlib
import json
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import configs
import data
import train
from configs import SettingError
from trainer.device import device_and_dtype, device_name
from trainer.flops import flops_of, training_flops


def where(L):
    """The first layer's tensor handed to every later layer, at each of the places where it can enter."""
    return [["gpt", "value_residual",
             *(f"shortcut:variant={place}" for place in ("query", "key", "matrix", "output", "hidden", "hidden_zero"))]]


def source(L):
    """Values from V_1, V_2, ... (code layers 0, 1, ...); then from V_2 where the stream starts at H_1, or at H_2."""
    cut = [[f"shortcut:variant=resid_start:resid_start={s}",
            f"shortcut:variant=resid_start_value:source=1:resid_start={s}"] for s in (1, 2) if s < L]
    return [["gpt", *(f"value_residual:source={n}" for n in range(L - 1))], *cut]


def target(L):
    """V_1 handed, half and half, to a single layer: paper layers 2 .. L, code layers 1 .. L-1."""
    half = "constant=0.5:self_weight=0.5"
    return [["gpt", *(f"value_residual:variant=sparse:targets={n}:{half}" for n in range(1, L))]]


def ladder(L):
    """From the baseline to MUDDFormer, a step at a time; the last arm is the baseline with the re-allocation alone."""
    return [["gpt", "mudd:dynamic=no:multiway=no", "mudd:dynamic=no", "mudd:multiway=no", "mudd",
             "mudd:reallocate_ffn=yes", "mudd:drop_ways=qkvr:reallocate_ffn=yes"]]


def streams(L):
    """MUDD without the mixture of its query, key, value or residual. Here MUDD is the baseline."""
    return [["mudd", *(f"mudd:drop_ways={way}" for way in "qkvr"), "gpt"]]


def feedback(L):
    """Who reads past tokens at which depth. The deeper baseline is the WhiteMatter paper's control."""
    return [["gpt", "feedback", "lckv", "fusedkv", "whitematter", f"whitematter:k={L}", "recurrent",
             f"gpt:n_layer={L * 3 // 2}"]]


STUDIES = {study.__name__: study for study in (where, source, target, ladder, streams, feedback)}


# ---------------------------------------------------------------------------------------------------------------------
# An arm


@dataclass
class Arm:
    label: str                # model:setting=value:...
    settings: dict            # of train.py, all but seed and out_dir
    identity: dict            # all that determines a run's result, but the seed
    config: object            # the model's
    parameters: int
    training_flops: float     # of the whole training, head included
    steps: int
    base: str | None = None   # label of its baseline; None: it is one


def make_arm(label, shared):
    """A label and the settings that all arms share -> Arm. Its model has been built, on paper, so it can be."""
    name, own = parse(label)
    if name not in train.MODELS:
        raise SettingError(f"--models: {name or 'an empty name'} is no model: choose among {', '.join(train.MODELS)}")
    for setting in shared.keys() - names_of(train.TrainConfig) - names_of(train.MODELS[name][0]):
        for other, (config_class, _) in train.MODELS.items():
            if setting in names_of(config_class):
                raise SettingError(f"--{setting} is no setting of {name}: write it behind its model, as in --models="
                                   f"{name},{other}:{setting}={shared[setting]}")
    settings = shared | own | dict(model=name)
    config, model_config, model_class = train.read_settings(settings)
    meta, tokens = open_data(config.data)
    vocab_size = meta["vocab_size"]
    if "vocab_size" not in settings:
        model_config.vocab_size = vocab_size
    if model_config.vocab_size < vocab_size:
        raise SettingError(f"vocab_size={model_config.vocab_size} is smaller than the {vocab_size} ids of the text: "
                           f"leave it out of {label} and of the settings of all")
    data.batch(tokens["train"], 0, 0, 1, model_config.block_size)        # refuses a text that is shorter than a block
    with torch.device("meta"):
        model = model_class(model_config)
    flops = flops_of(model_class, model_config)
    tokens = config.max_iters * config.batch_size * config.gradient_accumulation_steps * model_config.block_size
    return Arm(label, settings, identity(config, model), model_config, sum(p.numel() for p in model.parameters()),
               tokens * training_flops(flops), config.max_iters)


def labels(text):
    """"gpt,mudd:period=2" -> ["gpt", "mudd:period=2"]. A comma before a digit is part of a value, as in targets=2,3."""
    return re.split(r",(?!\d)", text)


def parse(label):
    """model:setting=value:... -> (model, {setting: value})"""
    name, *pairs = label.split(":")
    own = {}
    for pair in pairs:
        setting, equals, value = pair.partition("=")
        if not setting or not equals:
            raise SettingError(f"--models: {pair!r} in {label} is no setting: write model:setting=value")
        if setting in own or setting == "data":
            why = "there twice" if setting in own else "one text for all arms"
            raise SettingError(f"--models: {setting} in {label} is {why}: leave it out")
        own[setting] = value
    refuse_reserved(own)
    return name, own


def with_settings(label, **changes):
    name, own = parse(label)
    return ":".join([name, *(f"{setting}={value}" for setting, value in (own | changes).items())])


def names_of(config_class):
    return {field.name for field, _, _ in configs.fields(config_class)}


def refuse_reserved(names):
    instead = {"model": "--models", "seed": "--seeds and --first_seed", "out_dir": "--out",
               "overwrite": "delete a run's folder", "resume": "nothing, runs are found and resumed by themselves"}
    for name in names:
        if name in instead:
            raise SettingError(f"--{name} is not for a comparison; instead: {instead[name]}")


# ---------------------------------------------------------------------------------------------------------------------
# What makes two runs the same run


ELSEWHERE = {"data", "out_dir", "resume", "overwrite", "device", "dtype", "compile", "prompt", "sample_tokens"}


def identity(config, model):
    """All that determines a run's result but its seed, as JSON gives it back. `machine` may differ between machines."""
    device, dtype, _ = device_and_dtype(config, model.config)
    compiled = config.compile == "on" or config.compile == "auto" and device.type == "cuda"
    machine = dict(device=device_name(device), dtype=str(dtype), compiled=compiled, torch=torch.__version__)
    facts = dict(train={name: value for name, value in asdict(config).items() if name not in ELSEWHERE},
                 model={name: value for name, value in asdict(model.config).items() if name != "seed"},
                 data=data_facts(config.data), code=code_of(type(model).__module__, compiled), machine=machine)
    return json.loads(json.dumps(facts))


@functools.cache
def open_data(name):
    """(meta.json as a dict, {split: its tokens}) of a data set."""
    folder = data.dataset(name)
    meta = data.read_meta(folder)
    return meta, {split: data.open_tokens(folder, split, meta["vocab_size"]) for split in ("train", "val")}


@functools.cache
def data_facts(name):
    """What the text is: its tokenizer, its length, and a checksum of each split."""
    meta, splits = open_data(name)
    facts = dict(tokenizer=meta["tokenizer"], vocab_size=meta["vocab_size"])
    for split, tokens in splits.items():
        checksum, piece = 0, 2 ** 20                                     # tokens at a time
        for n, shard in enumerate(tokens.shards):
            for start in range(0, shard.count, piece):
                checksum = zlib.crc32(tokens.rows(n, [start], min(piece, shard.count - start)), checksum)
        facts |= {split: len(tokens), f"{split}_checksum": checksum}
    return facts


PROJECT = Path(train.__file__).parent
WITHOUT_EFFECT = {"console.py", "finish.py", "text.py"}      # of trainer/: they change no loss


def code_of(module, compiled):
    """Hashes of the code that makes a result: the model's files, the trainer's, and kernels.py if it is used."""
    trainer = [PROJECT / "train.py", *(PROJECT / "data").glob("*.py"),
               *(path for path in (PROJECT / "trainer").glob("*.py") if path.name not in WITHOUT_EFFECT)]
    code = dict(model=hash_of(files_of(module)), trainer=hash_of(trainer))
    return code | (dict(kernels=hash_of([PROJECT / "kernels.py"])) if compiled else {})


def files_of(module):
    """The file of a model's module, and of the modules of this project that it imports at its top level, and so on."""
    found, todo = set(), [module]
    while todo:
        name = todo.pop()
        path = PROJECT / f"{name.replace('.', '/')}.py"
        if name != "kernels" and path.is_file() and path not in found:
            found.add(path)
            for statement in ast.parse(path.read_text(encoding="utf-8")).body:
                todo += imported_by(statement)
    return found


def imported_by(statement):
    """The names of the modules that an import statement may mean; nothing for another statement."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)]
    return []


def hash_of(paths):
    text = "".join(path.relative_to(PROJECT).as_posix() + structure_of(path.read_text(encoding="utf-8"))
                   for path in sorted(paths))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def structure_of(source):
    """The structure of a file's code as text, alike in all versions of Python (ast.dump is not). Comments, blank lines
    and docstrings do not count, nor does train.py's list of models: a new model changes no result of another."""
    tree = ast.parse(source)
    if any(assigns_models(statement) for statement in tree.body):
        models = {model_class.__module__ for _, model_class in train.MODELS.values()}
        tree.body = [statement for statement in tree.body if not assigns_models(statement)
                     and not (isinstance(statement, ast.ImportFrom) and statement.module in models)]
    return str(structure(tree))


def assigns_models(statement):
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "MODELS"


def structure(node):
    """A node as (its type, its fields that are not empty), a list as a list, a name or number as text."""
    if isinstance(node, list):
        return [structure(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    can_have_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    if can_have_docstring and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return type(node).__name__, [(name, structure(value)) for name, value in fields.items() if value not in (None, [])]


# ---------------------------------------------------------------------------------------------------------------------
# Equal cost, and several values of a setting


def cost(kind, arm):
    return arm.parameters if kind == "params" else arm.training_flops


def matched(kind, by, plain, arm, shared):
    """The baseline `plain`, made wider or deeper until its cost is the nearest to the arm's.

    width: n_embd in steps that keep its heads whole, d_ff in proportion; then d_ff alone, in eights, for what is left.
    """
    target, c = cost(kind, arm), plain.config

    def nearest(values, change):
        def made(value):
            return make_arm(with_settings(plain.label, **change(value)), shared)
        n = bisect.bisect_left(values, target, key=lambda value: cost(kind, made(value)))      # cost rises with value
        below_and_above = [made(value) for value in values[max(0, n - 1):n + 1]]
        return min(below_and_above, key=lambda arm: abs(cost(kind, arm) - target))

    if by == "depth":
        return nearest(range(1, 4 * c.n_layer + 1), lambda n: dict(n_layer=n))
    step = 2 * c.n_head
    widths = range(max(step, c.n_embd // 2 // step * step), max(step, 2 * c.n_embd) + 1, step)
    wide = nearest(widths, lambda D: dict(n_embd=D, d_ff=max(1, round(c.d_ff * D / c.n_embd / 8)) * 8))
    return nearest(range(8, 2 * wide.config.d_ff + 1, 8), lambda F: dict(n_embd=wide.config.n_embd, d_ff=F))


def swept(setting, values, arm, shared):
    """The arm once for each value of the setting, in rising order. No values: half, once and twice what it is."""
    now = {**arm.identity["train"], **arm.identity["model"]}.get(setting)
    if isinstance(now, bool) or not isinstance(now, (int, float)):
        raise SettingError(f"--sweep={setting}: give a setting of {arm.label} that is a number, such as learning_rate")
    values = sorted({*(values or (type(now)(now * factor) for factor in (0.5, 1, 2)))})
    if len(values) < 2:
        raise SettingError(f"--sweep={setting}: {values[0]:g} alone is no sweep: give --sweep_values=1,2,3 or so")
    return [make_arm(with_settings(arm.label, **{setting: f"{value:.12g}"}), shared) for value in values]
