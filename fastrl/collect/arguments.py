"""Settings of what a trainer keeps and shows of the responses that it samples."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fastrl.settings import setting


@dataclass
class RecordArguments:
    """Settings of the ledger of responses, and of the table of the latest ones."""

    log_completions: bool = setting("Print and save prompts with their responses.", False)
    num_completions_to_print: int | None = setting(
        "Responses to print; None: all.", None, within="[0, inf)"
    )
    ledger: bool = setting(
        "Keep a row for each response in the folder ledger of output_dir: tokens, log-probs, "
        "rewards, advantages and the key of its random numbers. fastrl samples reads the ledger.",
        False,
    )
    log_unique_prompts: bool = setting("Log one response to each prompt to trackers.", False)

    def refuse_records(self, cause: str) -> None:
        """Raises ValueError if a setting is not default; ``cause``: why no response is sampled."""
        for field in fields(RecordArguments):
            value = getattr(self, field.name)
            if value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} is of responses that the policy samples, and {cause}: "
                    f"leave {field.name} out"
                )
