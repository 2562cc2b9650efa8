r"""Table 2 of ParallelSearch: EM of trained agents on seven question sets.

    python launch.py --config=configs/table2.py:search_r1=DIR,parallel=DIR              # Qwen2.5-7B, 8 x H100
    python launch.py --config=configs/table2.py:instruct,r1=DIR,otc=DIR,zero_search=DIR,step_search=DIR
    python launch.py --config=configs/table2.py:tiny,search_r1=DIR,parallel=DIR         # small world, its three kinds

A row for every agent that a model is given for: a work directory, or a model. Each is evaluated in its own
conversation, with one retriever and over whole sets. The numbers beside ours are those that the paper prints; it took
R1's from Search-R1, ZeroSearch's from ZeroSearch (Google, 500 questions a set), StepSearch's and OTC's from theirs.
"""

import common
import parallel_base
import parallel_tiny

from parasearch_jax.errors import UserError
from parasearch_jax.protocol import get_protocol
from parasearch_jax.sweep import make_sweep
from parasearch_jax.toy.recipe import toy_protocol

AGENTS = {  # argument -> (row, conversation)
    "r1": ("R1", "no_search"),
    "search_r1": ("Search-R1", "search_r1"),
    "otc": ("OTC", "otc"),
    "zero_search": ("ZeroSearch", "search_r1"),
    "step_search": ("StepSearch", "step_search"),
    "parallel": ("ParallelSearch", "parallel"),
}
SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_ = None
PAPER = {  # EM %, as SETS
    "instruct": {
        "r1": (27.0, 53.7, 19.9, 23.7, 29.2, 7.2, 29.3),
        "search_r1": (38.3, 59.3, 39.9, 37.6, 31.7, 15.1, 37.1),
        "otc": (38.9, _, _, 38.1, _, _, _),
        "zero_search": (43.6, 65.2, 48.8, 34.6, 35.2, 18.4, 27.8),
        "step_search": (_, _, _, 38.6, 36.6, 22.6, 40.0),
        "parallel": (46.2, 62.8, 42.9, 42.9, 42.4, 19.7, 41.1),
    },
    "base": {
        "r1": (29.7, 53.9, 20.2, 24.2, 27.3, 8.3, 29.6),
        "search_r1": (48.8, 64.4, 46.9, 43.6, 41.2, 18.7, 40.3),
        "otc": (44.6, 62.3, 42.5, 38.3, 36.3, 15.2, 39.1),
        "zero_search": (42.4, 66.4, 60.4, 32.0, 34.0, 18.0, 33.3),
        "step_search": (_, _, _, 38.0, 38.5, 21.6, 46.7),
        "parallel": (49.2, 65.8, 45.5, 45.7, 45.2, 22.9, 46.8),
    },
}


def get_config(arg=None):
    arg = common.parse_arg(arg, tiny=False, instruct=False, **dict.fromkeys(AGENTS, ""))
    given = [name for name in AGENTS if arg[name]]
    if not given and arg.tiny:  # the base as it is, in every conversation
        given = list(AGENTS)
    if not given:
        raise UserError(f"give a model for an agent: configs/table2.py:parallel=DIR; agents: {', '.join(AGENTS)}")
    base = parallel_base.get_config("instruct,eval" if arg.instruct else "eval")
    if arg.tiny:
        base = parallel_tiny.get_config("eval")
    base.name = "table2" + "_tiny" * arg.tiny + "_instruct" * arg.instruct
    base.evaluation.sampled = True
    make = toy_protocol if arg.tiny else get_protocol
    points = []
    for name in given:
        row, protocol = AGENTS[name]
        leaves = {"model.path": arg[name] or base.model.path, "protocol.name": protocol}
        leaves |= {"protocol.prompt": make(protocol).prompt}
        if not make(protocol).searches:
            leaves["rollout.max_turns"] = 0
        points.append({"label": row, **leaves})
    paper = None if arg.tiny else [PAPER["instruct" if arg.instruct else "base"][name] for name in given]
    columns = list(_columns(("single", "parallel", "sequential") if arg.tiny else SETS, paper))
    notes = [
        "The paper's rows are of several papers with retrievers and denominators of their own (51,712 of the 51,713 "
        "questions for its own runs), and sampled at temperature 1, where Search-R1's code means to be greedy."
    ]
    return make_sweep(base, points, table=dict(title="Table 2: EM", columns=columns, notes=[] if arg.tiny else notes))


def _columns(sets, paper):
    for i, name in enumerate(sets):
        for evaluation, how in (("final", ""), ("final_sampled", ", sampled")):
            numbers = tuple(row[i] for row in paper) if paper and how else ()
            shown = dict(subset=name, metric="em", evaluation=evaluation, factor=100.0, digits=1)
            yield dict(heading=f"{name}{how}", paper=numbers, **shown)
