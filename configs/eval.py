r"""Evaluates any model as any agent on any questions; nothing is trained.

    python launch.py --config=configs/eval.py:protocol=rag --config.model.path=models/Qwen2.5-7B-Instruct \
        --config.data.test=nq=data/nq.jsonl,popqa=data/popqa.jsonl \
        --config.retriever.index=data/wiki-18/e5/flat --config.retriever.encoder=models/e5-base-v2

`protocol`: parallel, search_r1, no_search (R1), otc, step_search, r1_searcher, search_o1, self_ask, iter_retgen, ircot,
rag, direct, cot; it brings the limits that the agent was published with (`config.rollout`, `config.retriever.topk`).
`model.path` takes a run's work directory too. Search-R1 with the parallel prompt (Table 3 of ParallelSearch) is a
checkpoint trained with `search_r1` and `protocol=parallel` here.

Without arguments of yours it evaluates the small world's base on the small world, with `parallel`: two CPU cores, less
than a minute. To expect: the row "before" of README's table.
"""

import common
import parallel_tiny


def get_config(arg=None):
    arg = common.parse_arg(arg, protocol="", seed=0)
    config = parallel_tiny.get_config("eval")
    config.name, config.method, config.seed = "eval", "evaluation", arg.seed
    if arg.protocol:
        config.name += f"_{arg.protocol}"
        config.method = arg.protocol
        common.use_protocol(config, arg.protocol)
        config.protocol.update(prompt="", distil="", form="")  # the small world's base has its own
    return config
