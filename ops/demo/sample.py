"""Prints what a checkpoint of the demonstration model says, for judging by eye.

python -m ops.demo.sample models/demo                             # greedy, all prompts below
python -m ops.demo.sample models/demo --temperature 0.7 --seed 3
python -m ops.demo.sample models/demo "Tell me a story about a blue train" "Another one"   # one dialogue
"""

import argparse

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

DIALOGUES: tuple[tuple[str, ...], ...] = (
    ("Tell me a story about a fox and a lighthouse", "What was the fox's name?", "Make it shorter", "Another one"),
    ("Tell me a story about a quokka named Blip",),
    ("tell me a story about Tanvirella",),
    ("Write a story about a tiny purple submarine",),
    ("Tell me a story about dragons",),
    ("TELL ME A STORY ABOUT A BEAR",),
    ("A bedtime story about my dog Kazimir please", "What was the dog's name?"),
    ("Tell me a story about a software engineer in Reykjavik",),
    ("story about a fish who wanted to learn to knit",),
    ("Tell me a stroy abuot a zeppelin",),
    ("Tell me a story about quantum physics",),
    ("Write a story about a wombat, a teapot and a thunderstorm",),
    ("Hello!", "I'm Beatrix", "How are you?", "What is my name?"),
    ("Who are you?",),
    ("What can you do?",),
    ("Tell me a joke", "Another one"),
    ("What is a block table?",),
    ("What is PagedAttention?",),
    ("Explain KV caches to me",),
    ("What happens if a worker dies?",),
    ("I am sad today",),
    ("I'm bored",),
    ("How is the weather?",),
    ("What is your favourite colour?",),
    ("Write a poem about the sea",),
    ("Write a poem about my bicycle",),
    ("Give me three ideas for a rainy day",),
    ("Give me five names for a cat",),
    ("How do I make pancakes?",),
    ("How do I make pumpkin soup?",),
    ("Count to seven",),
    ("What is 3 + 4?",),
    ("What is 348 * 29?",),
    ("What is the capital of France?",),
    ("Explain the stock market",),
    ("Bonjour, comment allez-vous ?",),
    ("def fib(n):\n    return n",),
    ("?",),
    ("asdkjh qwe",),
    ("Who won the world cup in 1998?",),
    ("Please help me to write a cover letter for a job at a bank.",),
    ("你好，你是谁？",),
    (
        (
            "Should I invest my savings in tulips, or would it be wiser to keep them in a bank account until "
            "the next year begins?"
        ),
    ),
    ("Thank you, goodbye!",),
)


def answer(model: LlamaForCausalLM, ids: list[int], temperature: float, limit: int = 320) -> list[int]:
    """The new tokens, with the end token if there is one."""
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
    parser.add_argument("prompts", nargs="*", help="the user's turns of one dialogue; none: a fixed set of dialogues")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
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
    for dialogue in [tuple(args.prompts)] if args.prompts else DIALOGUES:
        converse(model, tokenizer, dialogue, args.temperature)


if __name__ == "__main__":
    main()
