r"""Table 4 of ParallelSearch: the weights of the decomposition and the search-count reward, lambda_d and lambda_s.

    python launch.py --config=configs/table4.py:tiny          # on the small world; two CPU cores
    python launch.py --config=configs/table4.py               # Qwen2.5-7B-Instruct, 21 runs of parallel_base.py
    python launch.py --config=configs/table4.py:tiny,smoke    # two short runs
    python launch.py --config=configs/table4.py:tiny,seeds=1,jobs=2

Seven settings, three seeds. The paper prints (0.50, 0.35) a second time as (0.15, 0.50), so one of these two rows of it
is suspect. The evaluation before training is made once. The same command again runs what is not finished; rows that
failed are named. Leaves of the base are `--config.base.LEAF`; on several machines: docs/runs.md.

Hardware and hours: `:tiny` two CPU cores, 21 runs: not measured as a whole. The full one is 21 times what
`configs/parallel_base.py:instruct --plan` says.

To expect: the paper's numbers stand in the table beside ours, where they can be compared.
"""

import common
import parallel_base
import parallel_tiny

from parasearch_jax.sweep import make_sweep

LAMBDAS = ((0.0, 0.35), (0.15, 0.35), (0.35, 0.35), (0.5, 0.35), (0.15, 0.0), (0.15, 0.15), (0.15, 0.5))
# EM, DR and turns of each, from the paper: HotpotQA's and 2WikiMultiHopQA's parallel subsets.
HOTPOT = (
    (63.6, 90.94, 2.22),
    (65.6, 94.30, 2.08),
    (62.0, 91.02, 2.32),
    (64.1, 95.63, 2.06),
    (61.0, 96.41, 2.67),
    (65.0, 92.89, 2.13),
    (64.1, 95.63, 2.06),
)
WIKI2 = (
    (61.0, 98.33, 2.13),
    (65.0, 99.75, 2.03),
    (59.9, 96.91, 2.45),
    (60.6, 99.61, 2.03),
    (60.5, 99.72, 2.96),
    (62.1, 98.54, 2.13),
    (60.6, 99.61, 2.03),
)
NUMBERS = (("em", "EM %", 100.0, 1), ("dr", "DR %", 1.0, 2), ("turns", "turns", 1.0, 2))


def get_config(arg=None):
    arg = common.parse_arg(arg, tiny=False, smoke=False, seeds=3, jobs=1)
    points = [{"reward.lambda_d": d, "reward.lambda_s": s} for d, s in LAMBDAS]
    if arg.tiny or arg.smoke:
        base = parallel_tiny.get_config("smoke" if arg.smoke else None)
        sets = {"parallel": (), "sequential": (), "single": ()}
        notes = [
            "Small world, a model of a million parameters: the paper's numbers are of other questions and models, so "
            "none stands beside ours. What can be compared is the direction in which a weight moves them.",
        ]
    else:
        base = parallel_base.get_config("instruct")
        base.data.test = "hotpotqa/dev:parallel,2wikimultihopqa/dev:parallel"
        sets = {"hotpotqa_parallel": HOTPOT, "2wikimultihopqa_parallel": WIKI2}
        notes = [
            "The paper's are of the first 1,280 and 2,816 of these questions (its batches of 256 drop the rest), and "
            "sampled at temperature 1, where its code means to be greedy; ours of all questions.",
            "It prints one row twice, as (0.5, 0.35) and (0.15, 0.5).",
        ]
    base.evaluation.sampled = True
    base.name = "table4" + "_tiny" * (arg.tiny or arg.smoke) + "_smoke" * arg.smoke
    table = dict(title="Table 4: lambda_d and lambda_s", columns=list(_columns(sets)), notes=notes)
    if arg.smoke:
        points = points[1:3]
    return make_sweep(base, points, range(1 if arg.smoke else arg.seeds), arg.jobs, table=table)


def _columns(sets):
    for subset, rows in sets.items():
        for i, (metric, heading, factor, digits) in enumerate(NUMBERS):
            for evaluation, how in (("final", ""), ("final_sampled", ", sampled")):
                yield dict(
                    heading=f"{subset.removesuffix('_parallel')} {heading}{how}",
                    subset=subset,
                    metric=metric,
                    evaluation=evaluation,
                    factor=factor,
                    digits=digits,
                    paper=tuple(row[i] for row in rows) if how else (),
                )
