"""ParaSearch-JAX: training search agents by reinforcement learning, in JAX."""

import os

# Read when transformers and tokenizers are first imported: the tokenizer's thread pool would compete with XLA's for the
# cores, and that transformers finds no PyTorch is intended here, not a thing to advise about on every start.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.1.0"
