#!/usr/bin/env bash
# llguidance 1.9.1: a literal of a grammar may spell a token that was added to the vocabulary, as
# "<tool_call>" of Qwen's and Hermes' tokenizers, which is not marked as special there. The first
# mask of `"<tool_call>" "a"` then allows that token and no other, and consuming it fails: the
# matcher is in its error state for good. With `<[id]>` in the literal's place the token is taken.
# Whoever draws by the masks gets no valid text, of a regular expression or of choices either.
# Exits 0 while that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1 tokenizers==0.22.1
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

print("llguidance", version("llguidance"), "tokenizers", version("tokenizers"))
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
plain = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
plain.decoder = ByteLevel()
plain.add_special_tokens([AddedToken("<|end|>", special=True)])
plain.add_tokens([AddedToken("<tool_call>", special=False)])
end, call = (plain.token_to_id(x) for x in ("<|end|>", "<tool_call>"))
tokens = LLTokenizer(plain.to_str(), eos_token=end)


def first(grammar):
    """The tokens that a grammar's first mask allows, and whether the added token is taken."""
    matcher = LLMatcher(tokens, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    mask = matcher.compute_bitmask()
    allowed = [i for i in range(tokens.vocab_size) if mask[i // 8] >> i % 8 & 1]
    taken = matcher.consume_token(call)
    return allowed, taken, matcher.is_error()


literal = LLMatcher.grammar_from_lark('start: "<tool_call>" "a"')
regex = LLMatcher.grammar_from_regex("<tool_call>a")
named = LLMatcher.grammar_from_lark(f'start: <[{call}]> "a"')
for name, grammar in (("literal", literal), ("regex", regex), ("id", named)):
    print(name, first(grammar), "the added token is", call)
assert first(literal) == ([call], False, True)
assert first(regex) == ([call], False, True)
assert first(named) == ([call], True, False)
PY
