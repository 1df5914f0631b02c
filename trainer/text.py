"""The text that a model writes, piece by piece."""
import codecs

import torch


def stream_text(model, tokenizer, prompt, max_new_tokens, **options):
    """Yield the text that `model` writes after `prompt`. An empty prompt is end of text; the options are GPT.stream's.

    A piece holds whole characters, although a token may be a part of one.
    """
    ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    idx = torch.tensor([ids], device=next(model.parameters()).device)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in model.stream(idx, max_new_tokens, **options):
        known = token.item() < tokenizer.n_vocab                         # --vocab_size may be larger than the data's
        yield decoder.decode(tokenizer.decode_single_token_bytes(token.item()) if known else b"\xff")
    yield decoder.decode(b"", final=True)


def say_cut_prompt(model, tokenizer, prompt):
    """Print a line if the model reads the end of the prompt only."""
    length, size = len(tokenizer.encode_ordinary(prompt)), model.config.block_size
    if length > size:
        print(f"the prompt has {length} tokens and block_size is {size}: the model reads the last {size} of them")
