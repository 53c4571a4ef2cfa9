"""The two PPO loops that the classic documentation shows, on local models and a local reward.

python examples/classic_loop.py --model path/to/gpt2-like --output my_ppo_model
"""

import argparse

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoTokenizer

from fastrl import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
)
from fastrl.core import respond_to_batch


def reward_model(texts: list[str]) -> list[list[dict]]:
    """Stands in for a text-classification pipeline: likes texts in which words do not repeat."""
    shares = [len(set(text.split())) / max(len(text.split()), 1) for text in texts]
    return [[{"label": "bad", "score": 1 - s}, {"label": "good", "score": s}] for s in shares]


def one_query(model_path: str) -> dict:
    """The quick start: one query, one response, one step."""
    # get models
    model = AutoModelForCausalLMWithValueHead.from_pretrained(model_path)
    model_ref = create_reference_model(model)
    tokenizer = AutoTokenizer.from_pretrained(model_path)

    # initialize trainer
    ppo_config = PPOConfig(
        batch_size=1,
    )

    # encode a query
    query_txt = "This morning I went to the "
    query_tensor = tokenizer.encode(query_txt, return_tensors="pt")

    # get model response
    response_tensor = respond_to_batch(model, query_tensor)

    # create a ppo trainer
    ppo_trainer = PPOTrainer(ppo_config, model, model_ref, tokenizer)

    # define a reward for response
    # (this could be any reward such as human feedback or output from another model)
    reward = [torch.tensor(1.0)]

    # train model for one step with ppo
    return ppo_trainer.step([query_tensor[0]], [response_tensor[0]], reward)


def whole_loop(model_path: str, queries: list[str], output: str, epochs: int, **settings) -> dict:
    """The guide's loop: prompts come back with their responses, as ``generate`` does by default."""
    config = PPOConfig(
        model_name=model_path,
        learning_rate=1.41e-5,
        **settings,
    )
    model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.eos_token

    dataset = Dataset.from_dict({"query": queries})

    def tokenize(sample):
        sample["input_ids"] = tokenizer.encode(sample["query"])
        return sample

    dataset = dataset.map(tokenize, batched=False)

    ppo_trainer = PPOTrainer(
        model=model,
        config=config,
        dataset=dataset,
        tokenizer=tokenizer,
    )
    generation_kwargs = {
        "min_length": -1,
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "pad_token_id": tokenizer.eos_token_id,
    }
    stats = {}
    for _epoch in tqdm(range(epochs), "epoch: "):
        for batch in tqdm(ppo_trainer.dataloader):
            query_tensors = batch["input_ids"]

            #### Get response from SFTModel
            response_tensors = ppo_trainer.generate(query_tensors, **generation_kwargs)
            batch["response"] = [tokenizer.decode(r.squeeze()) for r in response_tensors]

            #### Compute reward score
            texts = [q + r for q, r in zip(batch["query"], batch["response"], strict=True)]
            pipe_outputs = reward_model(texts)
            rewards = [torch.tensor(output[1]["score"]) for output in pipe_outputs]

            #### Run PPO step
            stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
            ppo_trainer.log_stats(stats, batch, rewards)

    #### Save model
    ppo_trainer.save_pretrained(output)
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory or Hub id of a causal LM")
    parser.add_argument("--output", default="my_ppo_model", help="where the tuned model goes")
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()
    print(one_query(arguments.model)["ppo/loss/total"])
    queries = ["Explain the moon landing", "Why are birds real", "What happens at high speeds"]
    whole_loop(arguments.model, queries * 8, arguments.output, arguments.epochs, batch_size=8)


if __name__ == "__main__":
    main()
