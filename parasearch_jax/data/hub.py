"""The public question sets by name, from the Hugging Face hub: "nq/test", "hotpotqa/dev", "multihop_rag".

Each is one file of a data set at one commit, so a name always means the same questions. Counts are those of FlashRAG's
dataset card and of MultiHop-RAG's paper (arXiv 2401.15391); of the subsets, ParallelSearch's Table 5.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from parasearch_jax.errors import UserError

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets", "bcafb8dd07d453be3cbeeeb3f78be1841bddf92c"
MULTIHOP_RAG = "yixuantt/MultiHopRAG", "71ac0d0bd1f951d2d6b70311f7d2ae404e1ffa82"

# Questions of each split of FlashRAG.
SPLITS = {
    "nq": {"train": 79_168, "dev": 8_757, "test": 3_610},
    "triviaqa": {"train": 78_785, "dev": 8_837, "test": 11_313},
    "popqa": {"test": 14_267},
    "hotpotqa": {"train": 90_447, "dev": 7_405},
    "2wikimultihopqa": {"train": 15_000, "dev": 12_576},
    "musique": {"train": 19_938, "dev": 2_417},
    "bamboogle": {"test": 125},
}
TABLE_5 = {
    "hotpotqa/dev": {"parallel": 1_487, "sequential": 5_918},
    "2wikimultihopqa/dev": {"parallel": 3_040, "sequential": 6_785},
    "multihop_rag": {"parallel": 856, "sequential": 816},
}


@dataclasses.dataclass(frozen=True)
class PublicSet:
    """One file at one commit. `counts[""]` is the number of its questions, `counts["parallel"]` that of the subset, if
    the papers have one."""

    name: str
    repo: str
    revision: str
    file: str
    counts: dict[str, int]

    @property
    def dataset(self) -> str:
        """Its name without the split."""
        return self.name.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.file} of {self.repo}@{self.revision}"


PUBLIC = {
    f"{name}/{split}": PublicSet(
        f"{name}/{split}", *FLASHRAG, f"{name}/{split}.jsonl", {"": count, **TABLE_5.get(f"{name}/{split}", {})}
    )
    for name, splits in SPLITS.items()
    for split, count in splits.items()
} | {
    "multihop_rag": PublicSet("multihop_rag", *MULTIHOP_RAG, "MultiHopRAG.json", {"": 2_556, **TABLE_5["multihop_rag"]})
}


def download(public: PublicSet) -> Path:
    """Its file in the hub's cache, fetched if it isn't there; with HF_HUB_OFFLINE the cache alone is asked.

    Raises UserError naming the set, why it can't be had, and the way to bring it here.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants

    try:
        path = hub.hf_hub_download(public.repo, public.file, repo_type="dataset", revision=public.revision)
    except Exception as error:  # the hub's own, the transport's, the disk's: each a reason why the set isn't here
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        raise UserError(
            f"questions {public.name}: {public} is not in the hub's cache {constants.HF_HUB_CACHE} and can't be "
            f"had ({why}); where there is a network run `{_command(public)}` and bring the cache here, or give a file"
        ) from error
    return Path(path)


def lacks(public: PublicSet) -> str:
    """What keeps `download` from giving the set, "" if nothing is known to; asks nobody."""
    import huggingface_hub as hub
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        return ""
    cached = hub.try_to_load_from_cache(public.repo, public.file, repo_type="dataset", revision=public.revision)
    return "" if isinstance(cached, str) else f"{public.name} (HF_HUB_OFFLINE is set: `{_command(public)}`)"


def _command(public: PublicSet) -> str:
    return f"hf download {public.repo} {public.file} --repo-type dataset --revision {public.revision}"
