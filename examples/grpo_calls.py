"""A model that was trained on nothing learns which tool to call, and with what.

python examples/grpo_calls.py --output runs/grpo_calls

Two minutes on a CPU core. With ``tool_choice="required"`` each response begins with a valid call,
so that every reward says something; ``--free`` is the same run without it, which has nothing to
learn from. It prints the share of responses with a valid call, and the mean reward.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import fastrl

TEMPLATE = """
{%- if tools %}<|start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>
{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""
SPECIAL = ("<|pad|>", "<|start|>", "<|end|>", "<tool_call>", "</tool_call>")
WANTED = {
    **{f"paint it {x}": ("paint", {"colour": x}) for x in ("red", "blue", "green")},
    **{f"go {x}": ("move", {"where": x}) for x in ("left", "right", "up")},
}


def paint(colour: str) -> str:
    """Paints.

    Args:
        colour: The paint. (choices: ["red", "blue", "green"])
    """
    return "ok"


def move(where: str) -> str:
    """Moves.

    Args:
        where: The direction. (choices: ["left", "right", "up"])
    """
    return "ok"


def called(completion: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments of the first call in a completion."""
    for message in completion:
        for call in message.get("tool_calls") or ():
            return call["function"]["name"], call["function"]["arguments"]
    return None


def right(completions: Sequence[Any], wanted: Sequence[str], **columns: Any) -> list[float]:
    """A half for the right tool, and a half for its argument."""
    found = []
    for completion, asked in zip(completions, wanted, strict=True):
        (name, arguments), call = WANTED[asked], called(completion) or ("", {})
        found.append(0.5 * (call[0] == name) + 0.5 * (call[1] == arguments))
    return found


def valid(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Whether there is a call, of a tool that exists and with arguments that it takes."""
    return [float(called(completion) in WANTED.values()) for completion in completions]


def tiny_model() -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    """A model with random weights that reads bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL[:3]))
    core.add_tokens(list(SPECIAL[3:]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = TEMPLATE
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    shape = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**ids, **shape, **dropout, bos_token_id=None)), tokenizer


def train(output: str, free: bool = False, seed: int = 0, steps: int = 40) -> list[dict[str, Any]]:
    """The log of a run: in each step, the share of responses with a valid call, and the reward."""
    fastrl.set_seed(seed)
    model, tokenizer = tiny_model()
    constrained = {} if free else {"tool_choice": "required", "policy_support": "sampled"}
    args = fastrl.GRPOConfig(
        output, max_steps=steps, seed=seed, learning_rate=2e-3, per_device_train_batch_size=48,
        num_generations=8, max_completion_length=110, max_tool_calling_iterations=1,
        reward_weights=[1.0, 0.0], logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, bf16=False, **constrained,
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": x}], "wanted": x} for x in WANTED]
    data = Dataset.from_list(rows * 8)
    made = {"processing_class": tokenizer, "tools": [paint, move]}
    trainer = fastrl.GRPOTrainer(model, [right, valid], args, data, **made)
    trainer.train()
    return [log for log in trainer.state.log_history if "reward" in log]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/grpo_calls")
    parser.add_argument("--free", action="store_true", help="without tool_choice")
    args = parser.parse_args()
    for log in train(args.output, args.free)[::5]:
        print({x: log[x] for x in ("step", "rewards/valid/mean", "reward")})


if __name__ == "__main__":
    main()
