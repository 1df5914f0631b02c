"""Text in, batches out: tokenizers.py turns text into token ids, tokens.py keeps them in files and cuts batches."""
from data.tokenizers import token_bytes, tokenizer
from data.tokens import Tokens, TokenWriter, batch, dataset, open_tokens, read_meta, windows, write_meta, write_text
