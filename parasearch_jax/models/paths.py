"""What `model.path` names: a model directory, a .gguf file, the work directory of a run, or a model on the hub."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import jax

from parasearch_jax.errors import UserError
from parasearch_jax.models.decoder import DecoderConfig, Params, param_shapes
from parasearch_jax.models.weights import INDEX, read_json, weight_names
from parasearch_jax.sharding import rules

ACCEPTED = (
    "Accepted: a directory with config.json and model.safetensors (or its shards and their index), a .gguf file (or a "
    "directory with one), the work directory of a run, a name on the Hugging Face hub such as Qwen/Qwen2.5-7B."
)
_HUB_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_CONFIG_FILES = ("*.json", "*.jinja")  # also generation_config.json (end tokens) and the tokenizer's chat template


@dataclasses.dataclass(frozen=True)
class ModelPath:
    """Where the parts of a model lie.

    base         a directory in Hugging Face layout or a .gguf file: configuration, tokenizer, weights
    checkpoint   checkpoints/<step> of a run, whose policy takes the place of the base's weights; or None
    """

    base: Path
    checkpoint: Path | None = None

    @property
    def is_gguf(self) -> bool:
        return self.base.suffix == ".gguf"


def resolve(path: str | os.PathLike, download: bool = True) -> ModelPath:
    """Finds the model that `path` names; what is on this disk goes before what is on the hub.

    From the hub it fetches what the cache lacks, continuing where an earlier download broke off; with `download` False
    or HF_HUB_OFFLINE set it looks into the cache only. Raises UserError naming the path, what is absent, and the fix.
    """
    found = Path(path).expanduser()
    if found.is_dir():
        return _in_directory(found, download)
    if found.is_file():
        if found.suffix != ".gguf":
            raise UserError(f"model.path: {path} is a file, and no .gguf. If it belongs to a model, give the directory "
                            f"it lies in. {ACCEPTED}")  # fmt: skip
        return ModelPath(found)
    if re.fullmatch(_HUB_NAME, str(path)) and not str(path).endswith((".gguf", ".safetensors")):
        return _in_directory(_from_hub(str(path), download), download)
    raise UserError(f"model.path: {path} does not exist. {ACCEPTED}")


def _in_directory(path: Path, download: bool) -> ModelPath:
    # A work directory has a config.json too (the run's), so its model/ is looked for first.
    if (path / "model" / "config.json").exists() and _has_weights(path / "model"):
        return ModelPath(path / "model")
    if _has_weights(path):
        return ModelPath(path)
    if (path / "checkpoints").is_dir():
        return _last_checkpoint(path, download)
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"model.path: {path} holds {', '.join(file.name for file in files)}: name one of them.")
    if not files:
        raise UserError(f"model.path: {path} holds neither model.safetensors nor a .gguf file nor a run's checkpoints. "
                        f"{ACCEPTED}")  # fmt: skip
    return ModelPath(files[0])


def _has_weights(directory: Path) -> bool:
    return (directory / INDEX).exists() or any(directory.glob("*.safetensors"))


def _last_checkpoint(workdir: Path, download: bool) -> ModelPath:
    """The last complete checkpoint of a run, with the configuration and the tokenizer of the model it started from."""
    from parasearch_jax.checkpoint import latest_step  # Orbax, which no other path needs

    step = latest_step(workdir / "checkpoints")
    if step is None:
        raise UserError(f"model.path: {workdir} holds no complete checkpoint yet. Wait for the run's first, or "
                        "give the model that it starts from.")  # fmt: skip
    try:
        start = read_json(workdir / "config.json")["model"]["path"]
    except (KeyError, TypeError):
        raise UserError(f"model.path: {workdir / 'config.json'} does not say which model the run started from "
                        "(model.path). Give another work directory.") from None  # fmt: skip
    try:
        base = resolve(start, download).base
    except UserError as error:
        raise UserError(
            f"model.path: {workdir} holds a checkpoint of a run that started from {start}, whose config.json and "
            f"tokenizer are needed and can't be had: {str(error).removeprefix('model.path: ')}"
        ) from None
    return ModelPath(base, workdir.absolute() / "checkpoints" / str(step))  # Orbax refuses a relative path


def _from_hub(name: str, download: bool) -> Path:
    """The snapshot in the hub's cache, without folders of other formats (onnx/, original/)."""
    import huggingface_hub as hub

    patterns = [*_CONFIG_FILES, "model*.safetensors"]
    try:
        snapshot = hub.snapshot_download(
            name, allow_patterns=patterns, ignore_patterns="*/*", local_files_only=not download
        )
    except Exception as error:  # its own, the transport's, the disk's: each a reason why the model isn't here
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if hub.constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        hub_says = f", and none to be had from the Hugging Face hub ({why})" if download else ""
        raise UserError(
            f"model.path: there is no {name} here, none in the hub's cache {hub.constants.HF_HUB_CACHE}{hub_says}. "
            f"Check the name, or run `hf download {name}` where there is a network and bring the cache here. {ACCEPTED}"
        ) from error
    return Path(snapshot)


def restore_params(checkpoint: Path, cfg: DecoderConfig, shardings: Any = None) -> Params:
    """The policy of a checkpoint, fp32; neither the optimizer nor the critic is read. `shardings` as in load_params.

    Raises UserError naming the leaves that differ from what `cfg` says.
    """
    import orbax.checkpoint as ocp

    wanted, folder = param_shapes(cfg), checkpoint / "state"
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _, sharding=shardings: sharding, wanted)
    item = {"actor": {"params": rules.with_shardings(wanted, shardings)}}
    how = ocp.checkpoint_utils.construct_restore_args(item)
    with contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as reader:
        _check_leaves(checkpoint, reader.metadata(folder).item_metadata.tree["actor"]["params"], wanted)
        args = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        return reader.restore(folder, args=args)["actor"]["params"]


def _check_leaves(checkpoint: Path, saved: Any, wanted: Params) -> None:
    from parasearch_jax.checkpoint import leaves_by_path  # Orbax, as above

    theirs, ours = ({name: list(x.shape) for name, x in leaves_by_path(tree).items()} for tree in (saved, wanted))
    differ = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    if differ:
        some = ", ".join(f"{name} {theirs.get(name)} (expected {ours.get(name)})" for name in differ[:5])
        raise UserError(f"{checkpoint} does not fit the configuration of the model that its run started from: {some}. "
                        "Put that model back.")  # fmt: skip


# ---------------------------------------------------------------------------------------------- what belongs to a model


def model_files(path: str | os.PathLike) -> list[Path]:
    """The files whose content makes the model, in a fixed order: for fingerprints."""
    found = resolve(path)
    if found.checkpoint is None:
        return _base_files(found.base, (*_CONFIG_FILES, "*.safetensors"))
    arrays = sorted(file for file in (found.checkpoint / "state").rglob("*") if file.is_file())
    return [*_base_files(found.base, _CONFIG_FILES), *arrays]


def _base_files(base: Path, patterns: tuple[str, ...]) -> list[Path]:
    if base.suffix == ".gguf":
        return [base]
    return sorted(file for pattern in patterns for file in base.glob(pattern) if file.is_file())


def lacks(path: str | os.PathLike) -> str:
    """What keeps `path` from being loaded, "" if nothing: a missing file, a broken download. For preflight's page:
    short, and nothing is downloaded or read."""
    try:
        found = resolve(path, download=False)
    except UserError as error:
        return str(error).removeprefix("model.path: ").partition(". ")[0]  # its first sentence
    if found.is_gguf:
        return ""
    names = ["config.json", "tokenizer.json", *([] if found.checkpoint else weight_names(found.base))]
    absent = [name for name in names if not (found.base / name).exists()]
    return f"{found.base} (without {', '.join(absent)})" if absent else ""
