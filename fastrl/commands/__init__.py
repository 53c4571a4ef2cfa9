"""The commands: from flags to a run and its folder."""

# Each command's module, the dataclasses of its flags, and the function that takes them.
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "new": ("commands.new", (), "run_new"),
    "demo": ("demo.experiment", ("Demo",), "run_demo"),
    "sft": ("commands.sft", ("SFTJob", "SFTFlags"), "run_sft"),
    "reward": ("commands.reward", ("RewardJob", "RewardFlags"), "run_reward"),
    "align": ("commands.align", ("AlignJob", "AlignFlags"), "run_align"),
    "ppo": ("commands.ppo", ("PPOJob", "PPOFlags"), "run_ppo"),
    "grpo": ("commands.ppo", ("GRPOJob", "GRPOFlags"), "run_ppo"),
    "recipes": ("commands.recipes", (), "run_recipes"),
    "report": ("commands.report", (), "run_report"),
    "doctor": ("commands.doctor", (), "run_doctor"),
    "samples": ("commands.samples", (), "run_samples"),
    "chat": ("commands.chat", (), "run_chat"),
    "merge": ("commands.merge", (), "run_merge"),
    "push": ("commands.push", (), "run_push"),
    "replay": ("commands.replay", (), "run_replay"),
    "plan": ("commands.plan", (), "run_plan"),
    "env": ("commands.env", ("EnvFlags",), "run_env"),
    "run-trl": ("commands.run_trl", (), "run_trl"),
    "migrate": ("commands.migrate", (), "run_migrate"),
    "completion": ("commands.completion", (), "run_completion"),
}
