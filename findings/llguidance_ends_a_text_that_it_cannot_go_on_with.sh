#!/usr/bin/env bash
# llguidance 1.9.1: a regular expression that no text matches passes `validate_grammar`, its matcher
# is in no error state, and the first mask allows exactly the end token, as behind a complete text;
# only with that mask the matcher's state becomes an error. Any later failure looks the same: the
# masks of a matcher in its error state go on to allow the end token. Whoever fills masks and draws,
# as the batch functions for that do, ends texts that match nothing, without a word.
# Exits 0 while that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1 tokenizers==0.22.1
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

print("llguidance", version("llguidance"), "tokenizers", version("tokenizers"))
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
plain = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
plain.decoder = ByteLevel()
plain.add_special_tokens(["<|end|>"])
end = plain.token_to_id("<|end|>")
tokens = LLTokenizer(plain.to_str(), eos_token=end)


def allowed(matcher):
    mask = matcher.compute_bitmask()
    return [i for i in range(tokens.vocab_size) if mask[i // 8] >> i % 8 & 1]


nothing = LLMatcher.grammar_from_regex(r"[^\s\S]")
said = LLMatcher.validate_grammar(nothing, tokens)
matcher = LLMatcher(tokens, nothing, log_level=0)
before = matcher.is_error()
print("validated:", repr(said), "error before the mask:", before, "mask:", allowed(matcher),
      "error after it:", matcher.is_error(), "the end token is", end)
assert (said, before, matcher.is_error()) == ("", False, True)
assert allowed(matcher) == [end]

matcher = LLMatcher(tokens, LLMatcher.grammar_from_regex("ab"), log_level=0)
wrong = plain.token_to_id("c")
assert not matcher.consume_token(wrong)
print("behind a wrong token: error", matcher.is_error(), "mask:", allowed(matcher))
assert matcher.is_error()
assert allowed(matcher) == [end]
PY
