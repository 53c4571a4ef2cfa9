"""An environment of one's own: the policy asks it in several turns, by a method that is a tool.

python examples/own_environment.py --output runs/own_environment

Ten seconds on a CPU core. It prints how often a tiny model found a number, and how often it asked.
"""

import argparse

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from fastrl import GRPOConfig, GRPOTrainer, set_seed


# --8<-- [start:own]
class Guess:
    """A number from 1 to 3, to be found in two guesses."""

    def reset(self, secret: int, **columns) -> str:
        self.secret, self.solved = secret, False
        return "?"  # stands behind the row's prompt

    def guess(self, number: int) -> str:
        """Tries a number.

        Args:
            number: From 1 to 3.
        """
        self.solved = self.solved or number == self.secret
        return "right" if number == self.secret else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return float(self.solved)


# --8<-- [end:own]
CALL = '<tool_call>{"name": "guess", "arguments": {"number": %d}}</tool_call>'
WORDS = ["<user>", "<assistant>", "<tool>", "?", "right", "higher", "lower"]
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\
</tool_call>{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
DEFAULTS = {"per_device_train_batch_size": 48, "num_generations": 16, "learning_rate": 5e-3}
DEFAULTS |= {"generation_kwargs": {"max_new_tokens": 1}, "max_tool_calling_iterations": 2}
DEFAULTS |= {"lr_scheduler_type": "constant", "logging_steps": 10, "bf16": False}


def tiny_model() -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:  # a whole call is one token
    core = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    names = {"pad_token": "<unk>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.add_tokens([*WORDS, *(CALL % number for number in (1, 2, 3))])
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": len(tokenizer)}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, **ids)), tokenizer


def train(output: str, steps: int = 40) -> list[dict[str, float]]:
    """What was logged, means of ten steps each."""
    set_seed(0)
    (model, tokenizer), args = tiny_model(), GRPOConfig(output, max_steps=steps, **DEFAULTS)
    asked = [{"role": "user", "content": ""}]
    data = Dataset.from_list([{"prompt": asked, "secret": n} for n in (1, 2, 3)])
    trainer = GRPOTrainer(model, None, args, data, None, tokenizer, environment_factory=Guess)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    for log in logs:
        print(f"found {log['reward']:.2f}, asked {log['tools/call_frequency']:.2f} times")
    return logs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/own_environment")
    train(parser.parse_args().output)


if __name__ == "__main__":
    main()
