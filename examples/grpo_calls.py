"""A model that was trained on nothing learns to call a tool with the right argument.

python examples/grpo_calls.py --output runs/grpo_calls

Two minutes on a CPU core. With ``tool_choice="required"`` each response begins with a valid call,
and every reward says something; without it (``--free``) there is nothing to learn from. It prints
the share of responses with a valid call, and the mean reward.
"""

import argparse

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import fastrl

TEMPLATE = """{% for m in messages %}<|start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}{% if tools %}{% endif %}"""
COLOURS = ("red", "blue", "green", "black")
QUIET = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "bf16": False}


def paint(colour: str) -> str:
    """Paints.

    Args:
        colour: Of the paint. (choices: ["red", "blue", "green", "black"])
    """
    return "ok"


def called(completion):
    """The colour of the first call among a completion's messages."""
    calls = [call["function"] for m in completion for call in m.get("tool_calls") or ()]
    return next((x["arguments"].get("colour") for x in calls if x["name"] == "paint"), None)


def right(completions, colour, **columns):
    return [float(called(x) == y) for x, y in zip(completions, colour, strict=True)]


def valid(completions, **columns):
    return [float(called(x) in COLOURS) for x in completions]


def train(output: str, free: bool = False, seed: int = 0, steps: int = 40):
    """The log of a run: in each step, the share of responses with a valid call, and the reward."""
    fastrl.set_seed(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|pad|>", "<|end|>", "<|start|>"])
    core.add_tokens(["<tool_call>", "</tool_call>"])
    ends = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **ends)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "vocab_size": 261}
    model = GPT2LMHeadModel(GPT2Config(n_positions=256, n_embd=64, n_layer=2, n_head=4, **ids))
    forced = {} if free else {"tool_choice": "required", "policy_support": "sampled"}
    sizes = {"per_device_train_batch_size": 64, "max_completion_length": 110, "logging_steps": 1}
    sizes |= {"max_tool_calling_iterations": 1, "reward_weights": [1.0, 0.0], "max_steps": steps}
    args = fastrl.GRPOConfig(output, seed=seed, learning_rate=2e-3, **sizes, **forced, **QUIET)
    rows = [{"prompt": [{"role": "user", "content": f"in {x}"}], "colour": x} for x in COLOURS]
    made = {"processing_class": tokenizer, "tools": [paint]}
    trainer = fastrl.GRPOTrainer(model, [right, valid], args, Dataset.from_list(rows * 8), **made)
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
