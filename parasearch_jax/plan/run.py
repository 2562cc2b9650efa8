"""What a plan needs of a configuration: shapes and settings. Reads config.json files and file sizes, never weights."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from ml_collections import ConfigDict

from parasearch_jax.errors import UserError
from parasearch_jax.models.bert import BertConfig
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.models.paths import resolve
from parasearch_jax.models.shapes import SHAPES, named_shape
from parasearch_jax.models.weights import load_config, read_json
from parasearch_jax.plan.devices import Device, find_device
from parasearch_jax.retrieval import ENCODERS
from parasearch_jax.retrieval.folder import damaged, read_manifest
from parasearch_jax.retrieval.opening import INDEXES, find_index, is_built
from parasearch_jax.rl.learner import AlgorithmConfig
from parasearch_jax.rl.optim import OptimConfig
from parasearch_jax.rl.update import UpdateConfig
from parasearch_jax.rollout import RolloutConfig
from parasearch_jax.sharding.mesh import MeshConfig

# What lies in a public corpus, by the name of its folder, where its files are not here: (passages, bytes of the jsonl).
CORPORA = {"wiki-18": (21_015_324, 14 * 10**9)}
WIDTHS = {"e5-base-v2": 768, "e5-large-v2": 1024, "bge-base-en-v1.5": 768, "bge-large-en-v1.5": 1024}
_SAMPLE = 2**20  # bytes of a corpus whose lines are counted


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What the retriever holds in this process. None where nothing tells it."""

    passages: int | None
    width: int | None  # numbers of a vector
    index_bytes: int | None
    text_bytes: int  # of passages in memory: those of a built index are read from the disk as they are found
    on_gpu: bool
    source: str


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its configuration describes it. `tokens`: of a batch's rows, the largest bucket."""

    name: str
    model: DecoderConfig
    model_source: str
    mesh: MeshConfig
    algorithm: AlgorithmConfig
    learner: UpdateConfig
    optimizer: OptimConfig
    critic_optimizer: OptimConfig
    rollout: RolloutConfig
    tokens: int
    steps: int
    corpus: Corpus
    device: Device
    host_gib: float  # that the configuration says it needs; 0: says nothing

    @property
    def ppo(self) -> bool:
        """Whether there is a critic."""
        return self.steps > 0 and self.algorithm.name == "ppo"

    @property
    def reference(self) -> bool:
        return self.steps > 0 and bool(self.learner.kl_coef or self.algorithm.reward_kl)

    @property
    def episodes(self) -> int:
        """Of a step."""
        return self.algorithm.questions * self.algorithm.samples

    @property
    def rows(self) -> int:
        """Rows of a batch: the episodes, filled up to a multiple of the devices."""
        return -(-self.episodes // self.mesh.fsdp) * self.mesh.fsdp

    @property
    def item(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 4 if self.model.dtype == "float32" else 2


def read_run(config: ConfigDict) -> Run:
    """Raises UserError for a model whose shape nothing tells, and for settings that do not go together."""
    if config.algorithm.name == "sft":
        raise UserError(
            "--plan knows no sft. Its update takes the memory of GRPO's on the same model, mesh, train.buckets and "
            "learner.micro_rows: plan that, with --config.algorithm.name=grpo --config.algorithm.samples=2"
        )
    model, source = model_shape(config.model.path, config.model.dtype)
    algorithm = AlgorithmConfig(**config.algorithm)
    run = Run(
        name=config.name,
        model=model,
        model_source=source,
        mesh=MeshConfig(**config.mesh),
        algorithm=algorithm,
        learner=UpdateConfig(**config.learner, buckets=tuple(config.train.buckets), temperature=algorithm.temperature),
        optimizer=OptimConfig(**config.optimizer),
        critic_optimizer=OptimConfig(**config.critic_optimizer),
        rollout=RolloutConfig(**config.rollout, topk=config.retriever.topk),
        tokens=max(config.train.buckets),
        steps=config.train.steps,
        corpus=read_corpus(config.retriever),
        device=find_device(config.machine.device or "H100"),
        host_gib=config.machine.host_gib,
    )
    for name, rows in (("learner.micro_rows", run.learner.micro_rows), ("rollout.slots", run.rollout.slots)):
        if rows % run.mesh.fsdp:
            raise UserError(f"{name} is {rows}, mesh.fsdp is {run.mesh.fsdp}: give a multiple of mesh.fsdp")
    return run


# ---------------------------------------------------------------------------------------------------------- the model


def model_shape(path: str, dtype: str) -> tuple[DecoderConfig, str]:
    """The decoder that `model.path` names, and what told its shape: the model's own files where they are on this disk
    or in the hub's cache, else its name ("models/Qwen2.5-7B-Instruct" is Qwen2.5-7B). Downloads nothing."""
    file = Path(path).expanduser() / "config.json"
    try:
        base = resolve(path, download=False).base
    except UserError as error:  # no weights, which a plan can do without
        if file.exists() and "model_type" in read_json(file):
            return load_config(file.parent, dtype), str(file)
        if isinstance(cached := _in_hub_cache(path), str):
            return load_config(Path(cached).parent, dtype), cached
        return _by_name(path, dtype, error)
    if base.suffix == ".gguf":
        from parasearch_jax.models import gguf

        return gguf.read_config(gguf.open_gguf(base), dtype), str(base)
    return load_config(base, dtype), str(base / "config.json")


def _in_hub_cache(name: str) -> str | object | None:
    """The path of its config.json."""
    import huggingface_hub as hub

    try:
        return hub.try_to_load_from_cache(name, "config.json")
    except hub.errors.HFValidationError:  # no name of a model
        return None


def _by_name(path: str, dtype: str, absent: UserError) -> tuple[DecoderConfig, str]:
    name = re.sub(r"-(instruct|base|chat|hf)$", "", Path(path).name.lower()).removeprefix("meta-")
    if name not in SHAPES:
        told = str(absent).split(" Accepted: ")[0]
        raise UserError(
            f"--plan needs the model's shape. {told} Nor is {Path(path).name!r} a name whose shape is known: give a "
            f"directory with a config.json (no weights needed), or one of: {', '.join(SHAPES)}"
        )
    shape = dataclasses.replace(named_shape(name), dtype=dtype)
    return shape, f"the shape of {name}, by its name: there is no {path} here"


# ------------------------------------------------------------------------------------------------------ the retriever


def read_corpus(settings: ConfigDict) -> Corpus:
    """From files where they are here, else by name; a corpus that nothing tells of is told to be left out."""
    if settings.get("kind") == "remote":
        return Corpus(None, None, None, 0, False, f"searched by the server at {settings.url}: left out")
    from parasearch_jax.retrieval import needs  # imports FAISS

    on_gpu, index = settings.get("device", "cpu") == "gpu", settings.get("index")
    if index and is_built(index):
        return _built(find_index(index), on_gpu)
    path, width = Path(settings.get("corpus") or ""), _width(settings)
    if path.is_file():
        passages, text, source = _lines(path), path.stat().st_size, str(path)
    elif path.parent.name in CORPORA:
        passages, text = CORPORA[path.parent.name]
        source = f"{path.parent.name} by its name: there is no {path} here"
    else:
        return Corpus(None, width, None, 0, on_gpu, f"there is no {path} here: left out")
    kind = Path(index or "").name if Path(index or "").name in INDEXES else "flat"
    source += f"; index {kind}, not built here" if index else "; encoded at the start, all in memory"
    held = 0 if index else text + needs.PASSAGE * passages
    size = needs.opened_bytes(kind, passages, width) if width or kind == "bm25" else None
    return Corpus(passages, width, size, held, on_gpu, source)


def _built(folder: Path, on_gpu: bool) -> Corpus:
    from parasearch_jax.retrieval import needs

    manifest = read_manifest(folder)
    with damaged(folder):
        kind, params, passages = manifest["index"], manifest["parameters"], manifest["passages"]["count"]
        width = None if kind == "bm25" else read_manifest(folder.parent / "embeddings")["dim"]
        size = needs.opened_bytes(kind, passages, width or 0, params)
    return Corpus(passages, width, size, 0, on_gpu, f"{folder}, {passages:,} passages")


def _lines(path: Path) -> int:
    """Lines of a file; of a large one estimated from its beginning."""
    with path.open("rb") as file:
        begin = file.read(_SAMPLE)
    return max(1, round(begin.count(b"\n") * path.stat().st_size / max(len(begin), 1)))


def _width(settings: ConfigDict) -> int | None:
    """Numbers of a passage's vector."""
    encoder = settings.get("encoder")
    if encoder in ENCODERS:
        return settings.get("dim", 512)
    file = Path(encoder or "") / "config.json"
    if file.is_file():
        return BertConfig.from_hf(read_json(file)).hidden_size
    return WIDTHS.get(Path(encoder or "").name.lower())
