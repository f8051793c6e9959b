"""The form of a prompt: the way from the text or the messages of a call to tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptForm:
    """The parameters of a call that say how its prompts become tokens, as in vLLM.

    add_special_tokens: whether the tokenizer adds its special tokens; None: in completions, not in chats.
    add_generation_prompt: whether a chat ends with the beginning of an answer. continue_final_message: whether a chat
    ends within its last message instead. truncate_prompt_tokens: the longest prompt; longer ones lose tokens on the
    side `truncation_side`; -1: what fits into the context with the answer; None: no prompt is truncated.
    """

    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"

    def truncated(self, token_ids: list[int], room: int) -> list[int]:
        """Return the tokens of a prompt that remain. room: the longest prompt that fits with the answer."""
        length = self.truncate_prompt_tokens
        if length is None:
            return token_ids
        length = max(0, room) if length < 0 else length
        if len(token_ids) <= length:
            return token_ids
        return token_ids[-length:] if self.truncation_side == "left" and length else token_ids[:length]
