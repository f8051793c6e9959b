"""Prints answers of a checkpoint of the demonstration model, to judge them by eye.

python -m models.demo.training.sample models/demo                           # greedy, all dialogues of data/samples.toml
python -m models.demo.training.sample models/demo --temperature 0.7 --seed 3
python -m models.demo.training.sample models/demo "Tell me a story about a blue train" "Another one"   # one dialogue
"""

import argparse

import torch
from models.demo.training.data_files import DATA
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase


def answer(model: LlamaForCausalLM, ids: list[int], temperature: float, limit: int = 320) -> list[int]:
    """Generate an answer. Return the new tokens, including the end token if the answer ended."""
    options = (
        {"do_sample": True, "temperature": temperature, "top_p": 0.95, "top_k": 0}
        if temperature
        else {"do_sample": False, "temperature": None, "top_p": None}
    )
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, **options)
    return out[0, len(ids) :].tolist()


def converse(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: tuple[str, ...], temperature: float
) -> None:
    """Print the answers to the turns of one dialogue."""
    messages = []
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        ids = tokenizer.encode(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False),
            add_special_tokens=False,
        )
        new = answer(model, ids, temperature)
        ended = new[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(new, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
        print(f"> {prompt}\n{text}{'' if ended else ' [NO END]'}\n")
    print("---\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument(
        "prompts", nargs="*", help="the user's turns of one dialogue (default: all of data/samples.toml)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: 0)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--plain", action="store_true", help="continue the first prompt as raw text, without the chat template"
    )
    args = parser.parse_intermixed_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = LlamaForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    if args.plain:
        ids = tokenizer.encode(args.prompts[0])
        print(tokenizer.decode(ids + answer(model, ids, args.temperature)))
        return
    for dialogue in [tuple(args.prompts)] if args.prompts else DATA.samples.dialogues:
        converse(model, tokenizer, dialogue, args.temperature)


if __name__ == "__main__":
    main()
