r"""Table 3 of ParallelSearch: Search-R1, Search-R1 with the parallel prompt, and ParallelSearch on parallel questions.

    python launch.py --config=configs/table3.py:tiny                                   # small world; two CPU cores
    python launch.py --config=configs/table3.py:search_r1=DIR,parallel=DIR             # Qwen2.5-7B, 8 x H100
    python launch.py --config=configs/table3.py:instruct,search_r1=DIR,parallel=DIR

Three evaluations of two trained models, which have to be there; the directories are work directories. For `:tiny`:

    python launch.py --config=configs/parallel_tiny.py:protocol=search_r1,reward=em
    python launch.py --config=configs/parallel_tiny.py

`:multihop` is the third set of the table, which has a corpus of its own: give --config.base.retriever.index too. Model
calls are in percent of Search-R1's. The paper's seconds are of its hardware and batches, so none stands beside ours.
"""

import common
import parallel_base
import parallel_tiny

from parasearch_jax.protocol import get_protocol
from parasearch_jax.sweep import make_sweep
from parasearch_jax.toy.recipe import toy_protocol

# EM %, DR % and turns of the paper, by model and set: Search-R1, with the parallel prompt, ParallelSearch.
PAPER = {
    ("instruct", "hotpotqa"): ((58.0, None, 2.37), (62.0, 83.20, 2.46), (65.6, 94.30, 2.08)),
    ("base", "hotpotqa"): ((64.1, None, 4.00), (63.4, 9.06, 4.98), (67.3, 97.03, 2.13)),
    ("instruct", "2wikimultihopqa"): ((47.6, None, 3.05), (57.3, 97.59, 2.64), (65.0, 99.75, 2.03)),
    ("base", "2wikimultihopqa"): ((62.4, None, 4.00), (61.7, 19.14, 4.97), (69.1, 99.86, 2.34)),
    ("instruct", "multihop_rag"): ((50.9, None, 2.73), (48.8, 59.77, 3.37), (64.1, 88.67, 2.57)),
    ("base", "multihop_rag"): ((56.9, None, 4.00), (59.8, 19.66, 4.95), (57.3, 60.94, 2.89)),
}
SETS = {"hotpotqa": "hotpotqa/dev", "2wikimultihopqa": "2wikimultihopqa/dev", "multihop_rag": "multihop_rag"}
NUMBERS = (("em", "EM %", 100.0, 1), ("dr", "DR %", 1.0, 2), ("turns", "turns", 1.0, 2))


def get_config(arg=None):
    arg = common.parse_arg(arg, tiny=False, instruct=False, multihop=False, search_r1="", parallel="")
    if arg.tiny:
        base, made = parallel_tiny.get_config("eval"), ("runs/parallel_tiny_search_r1_em", "runs/parallel_tiny")
        sets, prompts = {"parallel": ()}, {name: toy_protocol(name).prompt for name in ("search_r1", "parallel")}
    else:
        base, made = parallel_base.get_config("instruct,eval" if arg.instruct else "eval"), ("", "")
        names = ("multihop_rag",) if arg.multihop else ("hotpotqa", "2wikimultihopqa")
        base.data.test = ",".join(f"{SETS[name]}:parallel" for name in names)
        model = "instruct" if arg.instruct else "base"
        sets = {f"{name}_parallel": PAPER[model, name] for name in names}
        prompts = {name: get_protocol(name).prompt for name in ("search_r1", "parallel")}
    base.name = "table3" + "_tiny" * arg.tiny + "_instruct" * arg.instruct + "_multihop" * arg.multihop
    base.evaluation.sampled = True
    searching, splitting = arg.search_r1 or made[0], arg.parallel or made[1]
    rows = (
        ("Search-R1", searching, "search_r1"),
        ("Search-R1 + parallel prompt", searching, "parallel"),
        ("ParallelSearch", splitting, "parallel"),
    )
    points = [
        {"label": label, "model.path": path, "protocol.name": name, "protocol.prompt": prompts[name]}
        for label, path, name in rows
    ]
    notes = [
        "The paper's are of the first questions of each set (its batches of 256 drop the rest), and sampled at "
        "temperature 1, where its code means to be greedy."
    ]
    table = dict(title="Table 3: parallel questions", columns=list(_columns(sets)), notes=[] if arg.tiny else notes)
    return make_sweep(base, points, table=table)


def _columns(sets):
    for subset, rows in sets.items():
        name = subset.removesuffix("_parallel")
        for i, (metric, heading, factor, digits) in enumerate(NUMBERS):
            for evaluation, how in (("final", ""), ("final_sampled", ", sampled")):
                paper = tuple(row[i] for row in rows) if how else ()
                shown = dict(subset=subset, metric=metric, evaluation=evaluation, factor=factor, digits=digits)
                yield dict(heading=f"{name} {heading}{how}", paper=paper, **shown)
        yield dict(heading=f"{name} s/question", subset=subset, metric="seconds_per_question", digits=3)
        yield dict(heading=f"{name} model calls %", subset=subset, metric="turns", relative=True, digits=1)
