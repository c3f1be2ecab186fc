"""Samples that follow a grammar: the mask is that of brute force over the vocabulary, and every text fits."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model
from lockstep.data import ByteTokenizer
from lockstep.errors import UserError
from lockstep.generate import grammars as grammars_module
from lockstep.generate.adjustments import Adjustment, adjusted_logits
from lockstep.generate.grammars import Grammars, Matcher, json_grammar, lark_grammar, regex_grammar
from lockstep.model import preset
from lockstep.ops.vocabulary import Whole
from tests.generate.engines import all_pages_are_free

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob"]},
        "age": {"type": "integer", "minimum": 3, "maximum": 90},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def _model(tokenizer, vocab):
    shape = replace(preset("qwen3:micro", vocab, (tokenizer.eos_id,)), max_positions=300, num_layers=1)
    return build_model(shape, "float32", seed=2)


@pytest.fixture(scope="module", params=["byte", "bpe"])
def engine(request, bpe_tokenizer):
    tokenizer = ByteTokenizer() if request.param == "byte" else bpe_tokenizer
    # A head may be larger than the vocabulary: those tokens are never allowed.
    model = _model(tokenizer, tokenizer.vocab_size + 6)
    return Engine(model, EngineConfig(max_sequences=8, cache_tokens=4096), tokenizer)


def _mask(matcher, vocab):
    bits = np.zeros(-(-vocab // 32), dtype=np.int32)
    matcher.fill_mask(bits)
    return np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab].astype(bool)


def _bytes_of(tokenizer, token):
    if isinstance(tokenizer, ByteTokenizer):
        return bytes([token]) if token < 256 else b""
    return tokenizer.decode([token]).encode()


def test_a_property_cannot_be_written_again_under_an_escaped_name(engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text, fits in [
        (r'{"a": 1, "\u0061": "x"}', False),
        (r'{"a": 1, "\"\n\t": "\r\f\b\\"}', True),
        ('{"a": 1, "é": "/"}', True),
    ]:
        matcher = engine.grammars.matcher(json_grammar(schema))
        assert all(map(matcher.accept, engine.tokenizer.encode(text))) is fits, text


@pytest.mark.parametrize("pattern", ["(ab|ba|aab)*c", "[ab]{2,5}", "sel(f|ves)?"])
def test_the_mask_is_that_of_trying_every_token(engine, pattern):
    """A token is allowed if some text of the language begins with what it adds; here the languages are small."""
    tokenizer, vocab = engine.tokenizer, engine.model.config.vocab_size
    alphabet = sorted(set(pattern) & set("abcselfv"))
    longest = 6
    texts, layer = [""], [""]
    for _ in range(longest):
        layer = [text + character for text in layer for character in alphabet]
        texts += layer if len(layer) < 20_000 else []
    whole = [text for text in texts if re.fullmatch(pattern, text)]
    prefixes = {text[:length] for text in whole for length in range(len(text) + 1)}
    begun = [text for text in sorted(prefixes) if len(text) <= 3]
    assert len(begun) > 3
    for text in begun:
        matcher = engine.grammars.matcher(regex_grammar(pattern))
        assert all(matcher.accept(token) for token in tokenizer.encode(text))
        mask = _mask(matcher, vocab)
        for token in range(vocab):
            if token == tokenizer.eos_id:
                assert mask[token] == (text in whole), (text, "end")
            elif token >= tokenizer.vocab_size or token in tokenizer.special_tokens().values():
                assert not mask[token], (text, token)
            else:
                added = _bytes_of(tokenizer, token)
                more = added.decode(errors="replace")
                if len(text) + len(more) <= 4:  # as far as the listed texts reach
                    assert mask[token] == (text + more in prefixes and bool(added)), (text, added)


def _fits(value):
    assert value.keys() == SCHEMA["properties"].keys()
    assert value["name"] in ("Ann", "Bob") and type(value["age"]) is int and 3 <= value["age"] <= 90
    assert len(value["tags"]) <= 2 and all(isinstance(tag, str) and len(tag) <= 4 for tag in value["tags"])
    return True


def test_every_finished_sample_of_a_schema_fits_it(engine):
    params = SamplingParams(max_tokens=200, n=12, seed=5, grammar=json_grammar(SCHEMA), temperature=1.5)
    (group,) = engine.generate([list(b"x")], params)
    texts = [engine.tokenizer.decode(c.token_ids) for c in group if c.finish_reason == "stop"]
    assert len(texts) > 8 and len(set(texts)) > 5
    assert all(_fits(json.loads(text)) for text in texts)


@pytest.mark.parametrize(
    "pattern", [r"[0-9]{3}-[a-z]{1,3}/x", r"a/b\\c\.[\"']", "é{2}|\N{SNOWMAN}", r"(?:yes|no)\n?", "line\nbreak"]
)
def test_every_finished_sample_of_a_regular_expression_matches_it(engine, pattern):
    params = SamplingParams(max_tokens=60, n=6, seed=1, grammar=regex_grammar(pattern))
    (group,) = engine.generate([[3, 4]], params)
    finished = [engine.tokenizer.decode(c.token_ids) for c in group if c.finish_reason == "stop"]
    assert finished and all(re.fullmatch(pattern, text) for text in finished), finished


def test_a_lark_grammar_may_name_special_tokens_and_json_without_a_schema_is_an_object(engine):
    grammar = lark_grammar('start: "(" inner ")"\ninner: /[ab]{1,2}/ | start')
    (group,) = engine.generate([[3]], SamplingParams(max_tokens=40, n=4, seed=2, grammar=grammar))
    for completion in group:
        text = engine.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length" or re.fullmatch(r"\(+[ab]{1,2}\)+", text)
    bias = tuple((token, 8.0) for token in engine.tokenizer.encode("}"))
    params = SamplingParams(max_tokens=90, n=4, seed=2, grammar=json_grammar(), logit_bias=bias)
    (group,) = engine.generate([[3]], params)
    texts = [engine.tokenizer.decode(c.token_ids) for c in group if c.finish_reason == "stop"]
    assert texts and all(isinstance(json.loads(text), dict) for text in texts)


def test_a_complete_grammar_ends_the_sample_even_before_min_tokens(engine):
    for pattern, least in (("abc", 0), ("abc", 9)):
        params = SamplingParams(max_tokens=9, seed=1, grammar=regex_grammar(pattern), min_tokens=least)
        ((completion,),) = engine.generate([[3]], params)
        assert engine.tokenizer.decode(completion.token_ids) == "abc" and completion.finish_reason == "stop"
    # Where the grammar may go on, min_tokens holds.
    params = SamplingParams(max_tokens=30, n=6, seed=1, grammar=regex_grammar("[ab]*"), min_tokens=12)
    (group,) = engine.generate([[3]], params)
    assert all(len(c.token_ids) >= 12 for c in group)


def test_the_mask_of_any_part_of_the_vocabulary_is_its_part_of_the_whole(engine):
    class Part(Whole):
        def __init__(self, first, stop):
            self.vocab, self.first, self.stop = vocab, first, stop

    vocab = engine.model.config.vocab_size
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(grammar=regex_grammar("[a-m]+"), min_tokens=3)
    # The second has no grammar.
    adjustments = [
        Adjustment(params, [], (engine.tokenizer.eos_id,), engine.grammars.matcher(params.grammar)),
        Adjustment(replace(params, grammar=""), [], (engine.tokenizer.eos_id,), None),
    ]
    whole = adjusted_logits(logits, adjustments, Whole(vocab))
    assert whole[0].isfinite().sum() < 30 + vocab // 4 and whole[1].isfinite().sum() == vocab - 1
    for cut in (1, 37, 64, 131, vocab - 1):
        parts = [adjusted_logits(logits[:, a:b], adjustments, Part(a, b)) for a, b in ((0, cut), (cut, vocab))]
        assert torch.equal(torch.cat(parts, 1), whole)


def test_a_state_that_fails_ends_its_request_and_no_other(engine, monkeypatch):
    class Broken(Matcher):
        def __init__(self, compiled, where):
            super().__init__(compiled)
            self.where, self.steps = where, 0

        def accept(self, token):
            self.steps += 1
            return super().accept(token) and not (self.where == "accept" and self.steps == 3)

        def fill_mask(self, bits):
            if self.where == "mask" and self.steps == 3:
                raise UserError("out of fuel")
            super().fill_mask(bits)

    grammar = regex_grammar("[ab]{20}")
    for where, said in (("accept", "the grammar does not allow a sampled token"), ("mask", "out of fuel")):
        own = Grammars.matcher
        with monkeypatch.context() as patch:
            patch.setattr(
                Grammars, "matcher", lambda self, text, where=where, own=own: Broken(own(self, text)._compiled, where)
            )
            broken = engine.add([3], SamplingParams(max_tokens=30, seed=1, n=2, grammar=grammar))
        other = engine.add([4], SamplingParams(max_tokens=24, seed=1, grammar=grammar))
        events = []
        while engine.has_work:
            events += engine.step()
        last = [event for event in events if event.request_id == broken][-1]
        assert last.finish_reason == "error" and said in last.problem
        rest = [event for event in events if event.request_id == other]
        assert rest[-1].finish_reason == "stop" and len(rest) <= 21
        assert all_pages_are_free(engine)
        with monkeypatch.context() as patch, pytest.raises(UserError, match=f"prompt 0: .*{said}"):
            patch.setattr(
                Grammars, "matcher", lambda self, text, where=where, own=own: Broken(own(self, text)._compiled, where)
            )
            engine.generate([[3]], SamplingParams(max_tokens=30, seed=1, grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (json_grammar({"type": "string", "format": "foo"}), "Unknown format"),
        (json_grammar({"not": {}}), "not"),
        (json_grammar({"type": "integer", "minimum": 5, "maximum": 4}), "cannot be used"),
        (regex_grammar("(a"), "cannot be used"),
        (lark_grammar("start: nothing"), "cannot be used"),
        (regex_grammar("a" * 2**18), "characters; the limit is"),
    ],
    ids=["format", "not", "empty", "regex", "lark", "long"],
)
def test_a_grammar_that_would_not_be_enforced_is_refused(engine, grammar, said):
    with pytest.raises(UserError, match=said):
        engine.grammars.compile(grammar)
    with pytest.raises(UserError, match=said):
        engine.generate([[3]], SamplingParams(grammar=grammar))
    assert not engine.has_work


def test_a_grammar_needs_an_end_a_tokenizer_and_no_ignore_eos(engine):
    grammar = regex_grammar("a")
    with pytest.raises(UserError, match="ignore_eos would ignore"):
        engine.generate([[3]], SamplingParams(grammar=grammar, ignore_eos=True))
    with pytest.raises(UserError, match="a grammar needs a tokenizer"):
        Engine(engine.model).generate([[3]], SamplingParams(grammar=grammar))
    with pytest.raises(UserError, match="needs a model with an end-of-text token"):
        Grammars(engine.tokenizer, engine.model.config.vocab_size, []).compile(grammar)


def test_a_panic_of_the_library_is_an_error_of_the_request(engine, monkeypatch):
    class Panic(BaseException):
        """As a panic in Rust arrives: no Exception."""

    class Panics:
        def __init__(self, *arguments, **options):
            raise Panic("assertion failed")

    own = Grammars(engine.tokenizer, engine.model.config.vocab_size, [engine.tokenizer.eos_id])
    monkeypatch.setattr("llguidance.LLTokenizer", Panics)
    with pytest.raises(UserError, match="llguidance cannot read this model's tokenizer.*: assertion failed"):
        own.compile(regex_grammar("a"))
    monkeypatch.undo()
    monkeypatch.setattr("llguidance.LLMatcher", Panics)
    with pytest.raises(UserError, match="the grammar cannot be used: assertion failed"):
        own.compile(regex_grammar("a"))


def test_a_tokenizer_that_the_library_panics_for_is_refused(tmp_path):
    """Each token extends another, over a thousand deep, as training on long rules of one character gives."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from lockstep.data.tokenizer import HuggingFaceTokenizer

    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: number for number, name in enumerate([*names, *("=" * n for n in range(2, 1100))])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("=" * n, "=") for n in range(1, 1099)]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="llguidance cannot read this model's tokenizer"):
        Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_id]).compile(regex_grammar("a"))


def test_compiled_grammars_are_kept_up_to_a_limit(engine, monkeypatch):
    monkeypatch.setattr(grammars_module, "KEPT", 2)
    own = Grammars(engine.tokenizer, engine.model.config.vocab_size, [engine.tokenizer.eos_id])
    for text in ("a", "b", "a", "c"):
        own.compile(regex_grammar(text))
    assert list(own._compiled) == [regex_grammar("a"), regex_grammar("c")]
    first, second = own.matcher(regex_grammar("a")), own.matcher(regex_grammar("a"))
    assert first.accept(engine.tokenizer.encode("a")[0])
    mask = _mask(second, engine.model.config.vocab_size)
    assert mask[engine.tokenizer.encode("a")[0]]  # the other's state is its own


def test_kept_grammars_are_limited_in_the_processor_time_that_they_have_taken(engine, monkeypatch):
    """Time bounds their memory, and that of their automata, which grow with use."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(grammars_module.time, "thread_time", lambda: next(seconds))  # each measured call takes one
    monkeypatch.setattr(grammars_module, "SECONDS_KEPT", 3)
    own = Grammars(engine.tokenizer, engine.model.config.vocab_size, [engine.tokenizer.eos_id])
    texts = [regex_grammar(text) for text in "abcd"]
    for text in texts:
        own.compile(text)
    assert list(own._compiled) == texts[1:]
    used = own.matcher(texts[1])
    for _ in range(2):
        _mask(used, engine.model.config.vocab_size)
    assert used.seconds == 2 and sum(each.seconds for each in own._compiled.values()) == 5
    own.compile(texts[0])
    assert list(own._compiled) == [texts[0]]  # the one that was used has taken three by itself


def test_a_grammar_that_has_failed_a_sample_is_compiled_again_and_says_so_on_one_line(engine, monkeypatch):
    """The samples of a compiled grammar share its automaton, whose limits fail all of them at once."""
    monkeypatch.setattr(grammars_module, "MOST_STATES", 60)
    params = SamplingParams(max_tokens=200, seed=1, grammar=regex_grammar("[ab]{200}"))
    for _ in range(2):
        request = engine.add([3], params)
        events = []
        while engine.has_work:
            events += engine.step()
        assert len(events) > 10 and events[-1].request_id == request
        assert events[-1].finish_reason == "error" and "too many" in events[-1].problem
        assert not {"\n", "<"} & set(events[-1].problem)


def test_a_free_automaton_is_smaller_than_those_of_schemas(engine):
    grammars = Grammars(engine.tokenizer, engine.model.config.vocab_size, [engine.tokenizer.eos_id])
    doubled = lark_grammar("start: A13\nA0: /x?/\n" + "\n".join(f"A{n + 1}: A{n} A{n}" for n in range(13)))
    for grammar in (doubled, regex_grammar("x*" * 9000)):
        with pytest.raises(UserError, match="too big"):
            grammars.compile(grammar, free=grammar)
    assert not grammars._compiled
    grammars.compile(json_grammar({"enum": [f"a rather long value {n}" for n in range(2000)]}))
