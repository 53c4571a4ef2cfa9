"""The commands: from flags to a run and its folder."""

# By command: its module, the dataclasses of its flags, and a function that takes their instances.
# Where there are no dataclasses the function takes the words of the command line: commands on runs
# have no settings, and the settings of a plan depend on its method. The functions raise ValueError
# (UsageError), TypeError, OSError or ImportError, which the program prints as one line.
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "new": ("tools.commands.new", (), "run_new"),
    "demo": ("tools.demo.experiment", ("Demo",), "run_demo"),
    "sft": ("tools.commands.sft", ("SFTJob", "SFTFlags"), "run_sft"),
    "reward": ("tools.commands.reward", ("RewardJob", "RewardFlags"), "run_reward"),
    "align": ("tools.commands.align", ("AlignJob", "AlignFlags"), "run_align"),
    "distill": ("tools.commands.distill", ("DistillJob", "DistillFlags"), "run_distill"),
    "ppo": ("tools.commands.ppo", ("PPOJob", "PPOFlags"), "run_ppo"),
    "grpo": ("tools.commands.ppo", ("GRPOJob", "GRPOFlags"), "run_ppo"),
    "recipes": ("tools.commands.recipes", (), "run_recipes"),
    "report": ("tools.commands.report", (), "run_report"),
    "doctor": ("tools.commands.doctor", (), "run_doctor"),
    "samples": ("tools.commands.samples", (), "run_samples"),
    "chat": ("tools.commands.chat", (), "run_chat"),
    "merge": ("tools.commands.merge", (), "run_merge"),
    "push": ("tools.commands.push", (), "run_push"),
    "replay": ("tools.commands.replay", (), "run_replay"),
    "plan": ("tools.commands.plan", (), "run_plan"),
    "env": ("tools.commands.env", ("EnvFlags",), "run_env"),
    "run-trl": ("tools.commands.run_trl", (), "run_trl"),
    "migrate": ("tools.commands.migrate", (), "run_migrate"),
    "completion": ("tools.commands.completion", (), "run_completion"),
}
