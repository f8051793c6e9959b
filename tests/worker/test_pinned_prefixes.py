"""Pinned prefixes: what a file may say, what of it is pinned, and that requests find it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quire.ops.paths import PROJECT_ROOT
from quire.shared.model.files import read_json
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.shared.text.chat_template import ChatTemplate, load_chat_template
from quire.shared.text.tokenizer import load_tokenizer, read_special_tokens
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.inspect.snapshot import take_snapshot
from quire.worker.pinned_prefixes import PinnedPrompt, PrefixError, load_prefixes, pin_prefixes
from tests.support.mock_model import EOS, VOCAB, MockModel

DEMO = PROJECT_ROOT / "models" / "demo"
VOCAB_SIZE = 1536
SYSTEM = {"role": "system", "content": "You are a fox."}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO, read_special_tokens(DEMO, read_json(DEMO / "tokenizer_config.json")))


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    config = read_json(DEMO / "tokenizer_config.json")
    found = load_chat_template(DEMO, config, read_special_tokens(DEMO, config))
    assert found is not None
    return found


@pytest.fixture
def load(tokenizer: Tokenizer, template: ChatTemplate, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Reads a file with these contents."""
    path = tmp_path / "prefixes.toml"

    def load(text: str, chat_template: ChatTemplate | None = template) -> list[PinnedPrompt]:
        path.write_text(text)
        return load_prefixes(path, tokenizer, chat_template, VOCAB_SIZE)

    return load


def test_the_example_of_the_documentation(load, tokenizer: Tokenizer) -> None:  # type: ignore[no-untyped-def]
    text = (PROJECT_ROOT / "docs" / "how-to" / "prefix-cache.md").read_text()
    [example] = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    support, tales, tokens = load(example)
    assert [one.name for one in (support, tales, tokens)] == ["support", "tales", "tokens"]
    assert [one.cache_salt for one in (support, tales, tokens)] == ["", "library", ""]
    assert "storyteller of a village" in tokenizer.decode(list(support.token_ids), skip_special_tokens=False)
    assert tokens.token_ids == (1, 20, 300, 400)
    size = -(-len(support.token_ids) // 16)
    assert f"pinned prefix support: {len(support.token_ids)} tokens in {size} blocks" in text


def test_messages_are_pinned_as_far_as_every_conversation_goes(
    load,  # type: ignore[no-untyped-def]
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> None:
    [prefix] = load('[[prefix]]\nname = "fox"\nmessages = [{role = "system", content = "You are a fox."}]')
    for said in ("Hello", "1 + 1?", "What do you eat?"):
        chat = template.render([SYSTEM, {"role": "user", "content": said}])
        token_ids = tuple(tokenizer.encode(chat, add_special_tokens=False).ids)
        assert token_ids[: len(prefix.token_ids)] == prefix.token_ids
    shown = tokenizer.decode(list(prefix.token_ids), skip_special_tokens=False)
    assert shown.endswith("<|user|>")


def test_a_text_has_the_special_tokens_of_a_plain_prompt(load, tokenizer: Tokenizer) -> None:  # type: ignore[no-untyped-def]
    [prefix] = load('[[prefix]]\nname = "t"\ntext = "Once upon a time"')
    assert list(prefix.token_ids) == tokenizer.encode("Once upon a time").ids


ENTRY = '[[prefix]]\nname = "p"\n'


def test_token_ids_and_salts_at_their_limits_are_taken(load) -> None:  # type: ignore[no-untyped-def]
    salts = ("s", "s" * 256)
    found = load("".join(f"[[prefix]]\nname = '{one}'\ntoken_ids = [0, 1535]\ncache_salt = '{one}'\n" for one in salts))
    assert found == [PinnedPrompt(one, (0, 1535), one) for one in salts]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = = 1", r"is not TOML: .*line 1.*; correct it there"),
        ("\xff", r"is not TOML: "),
        ("", r"has no prefix; add \[\[prefix\]\] entries"),
        ("prefix = 3", r"has no prefix; add"),
        ("prefix = []", r"has no prefix; add"),
        ("prefixes = []", r"unknown key 'prefixes'; entries begin with \[\[prefix\]\]"),
        ("[[prefix]]\ntext = 'x'", r"prefix 1: name is missing and must be a string"),
        ("[[prefix]]\nname = 3", r"prefix 1: name 3 must be a string that is not empty"),
        (ENTRY, r"prefix 1 \('p'\): it has none of text, messages, token_ids; give exactly one"),
        (ENTRY + "text = 'x'\ntoken_ids = [1]", r"it has text and token_ids of .*; give exactly one"),
        (ENTRY + "text = 'x'\nsalt = 's'", r"salt 's' is no field of a prefix; there are name, text,"),
        (ENTRY + "text = ''", r"text '' must be a string that is not empty"),
        (ENTRY + "text = 7", r"text 7 must be a string"),
        (ENTRY + "text = 'x'\ncache_salt = ''", r"cache_salt '' must be a string of 1 to 256 characters"),
        (ENTRY + "text = 'x'\ncache_salt = 1", r"cache_salt 1 must be a string"),
        (ENTRY + "token_ids = []", r"token_ids \[\] must be an array of token ids"),
        (ENTRY + "token_ids = [1, 1536]", r"token_ids\[1\] 1536 must be a token id from 0 to 1535"),
        (ENTRY + "token_ids = [true]", r"token_ids\[0\] True must be a token id"),
        (ENTRY + "messages = []", r"messages \[\] must be an array such as"),
        (ENTRY + "messages = ['x']", r"messages\[0\] 'x' must be a table"),
        (ENTRY + "messages = [{role = 'bot', content = 'x'}]", r"messages\[0\].role 'bot' must be one of system, user"),
        (ENTRY + "messages = [{role = 'user', content = 7}]", r"messages\[0\].content 7 must be a string"),
        (ENTRY + "messages = [{role = 'user'}]", r"messages\[0\].content is missing and must be"),
        (ENTRY + "messages = [{role = 'user', content = 'x', n = 1}]", r"messages\[0\].n 1 is no field of a message"),
        (ENTRY + "text = 'x'\n" + ENTRY + "text = 'y'", r"prefix 2 \('p'\): name 'p' is the name of an earlier prefix"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_the_remedy(load, tmp_path: Path, text: str, said: str) -> None:  # type: ignore[no-untyped-def]
    if text == "\xff":
        (tmp_path / "prefixes.toml").write_bytes(b"\xff")
        with pytest.raises(PrefixError, match=said):
            load_prefixes(tmp_path / "prefixes.toml", None, None, 1)  # type: ignore[arg-type]
        return
    with pytest.raises(PrefixError, match=said) as caught:
        load(text)
    assert str(caught.value).startswith(f"--pinned-prefixes {tmp_path}/prefixes.toml")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PrefixError, match="No such file or directory; give a TOML file"):
        load_prefixes(tmp_path / "none.toml", None, None, 1)  # type: ignore[arg-type]


def test_messages_that_the_model_cannot_take(load) -> None:  # type: ignore[no-untyped-def]
    text = ENTRY + "messages = [{role = 'user', content = 'x'}]"
    with pytest.raises(PrefixError, match="the model has no chat template; give text or token_ids instead"):
        load(text, None)
    strict = ChatTemplate("{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}", {})
    with pytest.raises(PrefixError, match=r"the chat template refuses them .*: one at a time; give"):
        load(text, strict)


def make_engine(prefix_caching: bool = True) -> Engine:
    limits = EngineLimits(
        num_blocks=12,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        prefix_caching=prefix_caching,
    )
    return Engine(MockModel(), limits, (EOS,), None, "mock")


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_requests_find_what_is_pinned_also_after_the_cache_was_full_of_others(prefix_caching: bool) -> None:
    engine = make_engine(prefix_caching)
    prefix = tuple(range(1, 11))
    pin_prefixes(engine, [PinnedPrompt("p", prefix), PinnedPrompt("salted", prefix, "s")])
    assert take_snapshot(engine).usage().blocks_pinned == 6
    params = SamplingParams(4, temperature=0.0, ignore_eos=True)
    generate(engine, [(i + 20,) * 20 for i in range(5)], params)
    for salt, hits in (("", 10), ("s", 10), ("another", 0)):
        before = take_snapshot(engine).usage().prefix_hit_tokens
        engine.add(GenerationRequest("r", "mock", (*prefix, 50, 51), params, salt))
        while engine.has_work:
            engine.step()
        assert take_snapshot(engine).usage().prefix_hit_tokens - before == hits
    engine.check_integrity()


def test_a_prefix_that_is_too_long_names_itself_the_limit_and_the_remedy() -> None:
    long = tuple(i % (VOCAB - 1) + 1 for i in range(40))
    with pytest.raises(PrefixError, match=r"pinned prefix 'long': .* exceed the context of 32 tokens; shorten it, or"):
        pin_prefixes(make_engine(), [PinnedPrompt("long", long)])
    half = [PinnedPrompt(name, (i + 1,) * 30) for i, name in enumerate("ab")]
    with pytest.raises(PrefixError, match=r"pinned prefix 'b': .* KV blocks and the cache has 4; shorten it, or raise"):
        pin_prefixes(make_engine(), half)
