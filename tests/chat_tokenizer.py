"""A byte-level tokenizer with chat templates that call tools, as families of models write them."""

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<|pad|>", "<|start|>", "<|end|>", "<tool_call>", "</tool_call>")
VOCABULARY = 256 + len(_SPECIAL)

_ROLES = """
{%- macro turn(role, text) %}{{ '<|start|>' + role + '\n' + text + '<|end|>\n' }}{% endmacro %}
{%- if tools %}{{ turn('system', 'Tools: ' + (tools | tojson)) }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ turn('tool', m.content) }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant\n' }}THOUGHT{{ m.content }}
        {%- for call in m.tool_calls or [] %}CALL{% endfor %}
        {{- '<|end|>\n' }}
    {%- else %}{{ turn(m.role, m.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}OPENED{% endif %}
"""
_HERMES = (
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' '
    "+ (call.function.arguments | tojson) + '}\\n</tool_call>' }}"
)
_XML = (
    "{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{% for key, x in call.function.arguments.items() %}"
    "{{ '<parameter=' + key + '>\\n' + (x | string) + '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}"
)
_GLM = (
    "{{ '<tool_call>' + call.function.name + '\\n' }}"
    "{% for key, x in call.function.arguments.items() %}"
    "{{ '<arg_key>' + key + '</arg_key>\\n<arg_value>' + (x | string) + '</arg_value>\\n' }}"
    "{% endfor %}{{ '</tool_call>' }}"
)
_LLAMA = (
    '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' '
    "+ (call.function.arguments | tojson) + '}' }}"
)
_GEMMA = (
    "{{ '<|tool_call>call:' + call.function.name + '{' }}"
    "{% for key, x in call.function.arguments.items() %}{{ ',' if not loop.first }}"
    "{{ key + ':' + (('<|\"|>' + x + '<|\"|>') if x is string else (x | tojson)) }}"
    "{% endfor %}{{ '}<tool_call|>' }}"
)
_OSS = (
    "{{ 'to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' "
    "+ (call.function.arguments | tojson) + '<|call|>' }}"
)
CALLS = {
    "hermes": _HERMES, "xml": _XML, "glm": _GLM, "llama": _LLAMA, "gemma": _GEMMA, "gpt-oss": _OSS,
}  # fmt: skip
# A thought is written in the last turn alone.
_FORGOTTEN = "{{ '<think>\\n\\n</think>\\n\\n' if loop.last }}"


def template(calls: str, thinks: bool = False) -> str:
    """A chat template.

    Args:
        calls: what it writes for each call of a tool.
        thinks: it begins a thought in front of each response, and forgets those of the past.
    """
    opened = "{{ '<think>\\n' }}" if thinks else ""
    text = _ROLES.replace("CALL", calls).replace("OPENED", opened)
    return text.replace("THOUGHT", _FORGOTTEN if thinks else "").strip()


def tokenizer(family: str = "hermes", thinks: bool = False) -> PreTrainedTokenizerFast:
    """A token for each byte, and for each special text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = ByteLevel()
    found = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", extra_special_tokens=[]
    )
    found.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    found.add_tokens(["<tool_call>", "</tool_call>"])
    found.chat_template = template(CALLS[family], thinks)
    return found
